"""Draw what a simulation found; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from outrider.lab.plots import Panel, Points, draw
from outrider.lab.simulate.figures import RunFigures
from outrider.lab.simulate.stages import ACCEPTANCES, LOADS, STAGES, StageRow, StagesStudy, lines_of
from outrider.lab.simulate.studies import DayStudy

DASHED = frozenset({"off", "oracle"})  # arms that are drawn apart


def plot_loads(rows: Sequence[RunFigures], path: Path) -> None:
    """Draw throughput, goodput and the median time per token against load, a line per arm, as one PNG."""

    def lines(figure: Callable[[RunFigures], float]) -> dict[str, Points]:
        arms = {row.name: [own for own in rows if own.name == row.name] for row in rows}
        return {name: ([row.qps for row in own], [figure(row) for row in own]) for name, own in arms.items()}

    shown = {
        "throughput, tokens/s": lines(lambda row: row.tokens_per_s),
        "goodput, tokens/s": lines(lambda row: row.goodput_tokens_per_s),
        "time per output token, median, ms": lines(lambda row: row.tpot_p50_s * 1e3),
    }
    panels = [Panel(x="requests/s sent", y=unit, lines=found, dashed=DASHED) for unit, found in shown.items()]
    draw(panels, path, title=f"Simulated fleet of {rows[0].num_accelerators} accelerators", size=(17, 5))


def plot_day(study: DayStudy, path: Path) -> None:
    """Draw the day's load, the pools and the price, as one PNG."""
    samples, times = study.samples, [sample.at_s for sample in study.samples]
    within = [at_s for at_s in times if at_s <= study.day.length_s]
    load = {
        "requests/s": (within, study.day.qps(np.asarray(within)).tolist()),
        "requests running and waiting": (times, [float(sample.num_requests) for sample in samples]),
    }
    pools = {
        "verifiers": (times, [float(sample.num_verifiers) for sample in samples]),
        "drafters": (times, [float(sample.num_drafters) for sample in samples]),
    }
    prices = [float("nan") if sample.mean_price is None else sample.mean_price for sample in samples]
    panels = [
        Panel(x="", y="load", lines=load, marker=None),
        Panel(x="", y="replicas", lines=pools, steps=frozenset(pools), marker=None),
        Panel(x="time, s", y="price of a draft token", lines={"mean price": (times, prices)}, marker=None),
    ]
    draw(panels, path, title=f"A day of {study.day.length_s:g} simulated seconds", size=(13, 8), rows=3)


def plot_stages(study: StagesStudy, path: Path) -> None:
    """Draw what drafts bring over none at each load: on 1, 2 and 4 stages by the way, with experts by the devices."""

    def lines(rows: Sequence[StageRow], name: Callable[[StageRow], str]) -> dict[str, Points]:
        return {name(own[0]): (range(len(LOADS)), [row.ratio for row in own]) for own in lines_of(rows)}

    def panel(title: str, found: dict[str, Points]) -> Panel:
        return Panel(x=f"requests, {title}", y="tokens/s ÷ none", lines=found, ticks=[*map(str, LOADS)])

    shown = [row for row in study.stages if row.acceptance in ACCEPTANCES[1:]]
    panels = [
        panel(
            f"{count} stages" if count > 1 else "1 stage",
            lines([row for row in shown if row.parts == count], lambda row: f"{row.way}, {row.acceptance:g}"),
        )
        for count in STAGES
    ]
    middle = [row for row in study.experts if row.acceptance == ACCEPTANCES[1]]
    panels.append(panel("experts over devices, 0.7", lines(middle, lambda row: str(row.parts))))
    draw(panels, path, title="Drafts on stages and experts, by arithmetic", size=(18, 5))
