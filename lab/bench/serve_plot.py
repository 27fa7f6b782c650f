"""Draw what a load of a server measured; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outrider.lab.bench.serve import ServeBenchResult
from outrider.lab.bench.serve_figures import Latency
from outrider.lab.bench.serve_report import axis_name

PERCENTILES = ("p50_s", "p90_s", "p99_s")


def plot(result: ServeBenchResult, path: Path) -> None:
    """Draw throughput and goodput, TTFT and ITL over the load, as one PNG."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    throughput, ttft, itl = figure.subplots(1, 3)
    _plot_lines(
        throughput,
        result,
        {
            "throughput": [row.tokens_per_s for row in result.figures],
            "goodput": [row.goodput_tokens_per_s for row in result.figures],
        },
        "tokens/s",
    )
    _plot_lines(ttft, result, _percentile_lines([row.ttft for row in result.figures]), "time to first token, ms")
    _plot_lines(itl, result, _percentile_lines([row.itl for row in result.figures]), "inter-token latency, ms")
    figure.suptitle(f"{result.model} at {result.url}")
    figure.savefig(path, format="png", dpi=110)


def _percentile_lines(latencies: Sequence[Latency | None]) -> dict[str, list[float]]:
    return {
        name.removesuffix("_s"): [
            float("nan") if latency is None else getattr(latency, name) * 1e3 for latency in latencies
        ]
        for name in PERCENTILES
    }


def _plot_lines(axes: Axes, result: ServeBenchResult, lines: dict[str, list[float]], unit: str) -> None:
    places = range(len(result.figures))  # evenly spaced: loads are often powers of two, and a rate may be infinite
    for name, values in lines.items():
        axes.plot(places, values, marker="o", label=name)
    axes.set_xticks(places, [row.point.value for row in result.figures])
    axes.set_xlabel(axis_name(result))
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
