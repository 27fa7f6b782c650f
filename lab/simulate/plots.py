"""Draw what a simulation found; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.lab.simulate.figures import RunFigures
from outrider.lab.simulate.studies import DayStudy

DOTTED = ("off", "oracle")  # arms that are drawn apart


def plot_loads(rows: Sequence[RunFigures], path: Path) -> None:
    """Draw throughput, goodput and the median time per token against load, a line per arm, as one PNG."""
    figure = Figure(figsize=(17, 5), layout="constrained")
    throughput, goodput, tpot = figure.subplots(1, 3)
    for name in dict.fromkeys(row.name for row in rows):
        points = [row for row in rows if row.name == name]
        loads = [row.qps for row in points]
        style = "--" if name in DOTTED else "-"
        throughput.plot(loads, [row.tokens_per_s for row in points], style, marker="o", label=name)
        goodput.plot(loads, [row.goodput_tokens_per_s for row in points], style, marker="o", label=name)
        tpot.plot(loads, [row.tpot_p50_s * 1e3 for row in points], style, marker="o", label=name)
    _finish(throughput, "requests/s sent", "throughput, tokens/s")
    _finish(goodput, "requests/s sent", "goodput, tokens/s")
    _finish(tpot, "requests/s sent", "time per output token, median, ms")
    figure.suptitle(f"Simulated fleet of {rows[0].num_accelerators} accelerators")
    figure.savefig(path, format="png", dpi=110)


def plot_day(study: DayStudy, path: Path) -> None:
    """Draw the day's load, the pools and the price, as one PNG."""
    figure = Figure(figsize=(13, 8), layout="constrained")
    load, pools, price = figure.subplots(3, 1, sharex=True)
    times = np.asarray([sample.at_s for sample in study.samples])
    within = times <= study.day.length_s
    load.plot(times[within], study.day.qps(times[within]), label="requests/s")
    load.plot(times, [sample.num_requests for sample in study.samples], label="requests running and waiting")
    pools.step(times, [sample.num_verifiers for sample in study.samples], where="post", label="verifiers")
    pools.step(times, [sample.num_drafters for sample in study.samples], where="post", label="drafters")
    prices = [float("nan") if sample.mean_price is None else sample.mean_price for sample in study.samples]
    price.plot(times, prices, label="mean price")
    _finish(load, "", "load")
    _finish(pools, "", "replicas")
    _finish(price, "time, s", "price of a draft token")
    figure.suptitle(f"A day of {study.day.length_s:g} simulated seconds")
    figure.savefig(path, format="png", dpi=110)


def _finish(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
