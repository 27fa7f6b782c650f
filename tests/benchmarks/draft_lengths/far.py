"""`make study NAME=far`: an engine that prices drafts beside one that makes none, in virtual time, a drafter elsewhere.

The engine, its scheduler and its pricing are those that serve; steps and drafts take what the scenario says
(`FarBench`). So two commits, or a mechanism and its absence, compare exactly. What moves a figure by chance is which
tokens the drafter gets wrong: that is drawn by the requests' names, and `--orders` draws it several times.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click

from fakes.priced_bench import ONE_CORE, FarBench, FarDrafts
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.lab.report import files, write

PLAIN_WIDTH = 120  # columns of text where the output is no terminal


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A drafter, its machine and the load; times as `FarDrafts` takes them."""

    name: str
    level_s: float
    fixed_s: float = 0.003
    opening_s: float = 0.005
    cold_s: tuple[float, ...] = ()
    share_wrong: float = 0.3
    share_told: float | None = None
    contention: float = 0.2
    concurrency: int = 1
    num_requests: int = 48
    then_wrong: float | None = None  # the share of wrong tokens in a second half; None: as in the first
    loads: tuple[int, ...] = ()  # concurrencies in turn; (): the one above


COLD_S = (0.02,) * 10  # a cold drafter's first answers, each besides its usual time

SCENARIOS = (
    Scenario(name="4 ms a position, 1 request", level_s=0.004, contention=0.0),
    Scenario(name="4 ms a position, 16", level_s=0.004, contention=0.0, concurrency=16, num_requests=128),
    Scenario(name="6 ms and 0.5 a position, 4", level_s=0.0005, fixed_s=0.006, concurrency=4),
    Scenario(name="steps slowed by half, 1", level_s=0.002, contention=0.5),
    Scenario(name="steps slowed by half, 4", level_s=0.002, contention=0.5, concurrency=4),
    Scenario(name="bad drafts, 4", level_s=0.002, share_wrong=0.8, concurrency=4, num_requests=96),
    Scenario(name="told, 16", level_s=0.001, share_wrong=0.5, share_told=1.0, concurrency=16, num_requests=128),
    Scenario(
        name="told, then bad, 4",
        level_s=0.0,
        fixed_s=0.004,
        opening_s=0.004,
        share_wrong=0.5,
        share_told=1.0,
        contention=0.0,
        concurrency=4,
        num_requests=64,
        then_wrong=0.95,
    ),
    Scenario(name="half told, 4", level_s=0.001, share_wrong=0.5, share_told=0.8, concurrency=4, num_requests=96),
    Scenario(name="bad, then good, 4", level_s=0.001, share_wrong=0.9, then_wrong=0.2, concurrency=4),
    Scenario(name="prompts read for 20 ms, 1", level_s=0.003, opening_s=0.02),
    Scenario(name="bad, then good, long, 1", level_s=0.001, share_wrong=0.95, then_wrong=0.2, num_requests=150),
    Scenario(name="first calls of 0.15 s, 4", level_s=0.001, cold_s=(0.15,) * 3, share_wrong=0.2, concurrency=4),
    Scenario(name="cold start, 1", level_s=0.003, opening_s=0.02, cold_s=COLD_S, share_wrong=0.15, num_requests=32),
    Scenario(name="hardly pay, 4", level_s=0.004, fixed_s=0.001, share_wrong=0.5, concurrency=4, num_requests=160),
    Scenario(name="load step, 1, 32, 1", level_s=0.002, opening_s=0.01, share_wrong=0.4, loads=(1, 32, 1)),
)


def speed_of_off(scenario: Scenario, order: int) -> float:
    """Return tokens per second with priced drafts, by those without drafts; `order` names the requests."""

    def seconds(**plan: object) -> float:
        drafts = FarDrafts(
            level_s=scenario.level_s,
            fixed_s=scenario.fixed_s,
            opening_s=scenario.opening_s,
            cold_s=scenario.cold_s,
            share_wrong=scenario.share_wrong,
            share_told=scenario.share_told,
        )
        bench = FarBench(drafts, ONE_CORE, contention=scenario.contention, first_run=100 * order)
        for concurrency in scenario.loads or (scenario.concurrency,):
            bench.speed(concurrency, num_requests=max(scenario.num_requests, 2 * concurrency), **plan)
        if scenario.then_wrong is not None:
            drafts.share_wrong = scenario.then_wrong
            bench.speed(scenario.concurrency, num_requests=scenario.num_requests, **plan)
        return bench.now_s

    return seconds(draft_length=0, is_pinned=True) / seconds()


def measure(num_orders: int, on_scenario: Callable[[str], None]) -> dict[str, list[float]]:
    """Return each scenario's figure in each order."""
    found: dict[str, list[float]] = {}
    for scenario in SCENARIOS:
        found[scenario.name] = [speed_of_off(scenario, order) for order in range(num_orders)]
        on_scenario(f"{scenario.name}: {statistics.fmean(found[scenario.name]):.3f}")
    return found


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--orders", "num_orders", type=click.IntRange(min=1), default=4, show_default=True)
@files("json")
@click.option(
    "--beside",
    "earlier_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What --json wrote on another commit: its figures and the ratios are shown, too.",
)
def far(num_orders: int, json_file: Path | None, earlier_file: Path | None) -> None:
    """Show what priced drafts bring with a drafter elsewhere, in virtual time: tokens per second of plain decoding."""
    found = measure(num_orders, lambda line: click.echo(line, err=True))
    earlier = {} if earlier_file is None else json.loads(earlier_file.read_text())
    console = console_of(PLAIN_WIDTH)
    headings = ["scenario", "of off", "least", *(["before", "of before, mean", "least"] if earlier else [])]
    rows = []
    for name, figures in found.items():
        row = [name, f"{statistics.fmean(figures):.3f}", f"{min(figures):.3f}"]
        if name in earlier:
            ratios = [now / before for now, before in zip(figures, earlier[name], strict=False)]
            row += [f"{statistics.fmean(earlier[name]):.3f}", f"{statistics.fmean(ratios):.3f}", f"{min(ratios):.3f}"]
        rows.append(row)
    console.print("\n".join(markdown_table(headings, rows, num_left=1)))
    write(json_file, lambda: found)
