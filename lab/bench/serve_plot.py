"""Draw what a load of a server measured; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.lab.bench.serve import ServeBenchResult
from outrider.lab.bench.serve_figures import Latency
from outrider.lab.bench.serve_report import axis_name
from outrider.lab.plots import Panel, Points, draw

PERCENTILES = ("p50_s", "p90_s", "p99_s")


def plot(result: ServeBenchResult, path: Path) -> None:
    """Draw throughput and goodput, TTFT and ITL over the load, as one PNG."""
    places = range(len(result.figures))  # evenly spaced: loads are often powers of two, and a rate may be infinite
    speeds = {
        "throughput": (places, [row.tokens_per_s for row in result.figures]),
        "goodput": (places, [row.goodput_tokens_per_s for row in result.figures]),
    }

    def latencies(found: Sequence[Latency | None]) -> dict[str, Points]:
        none = float("nan")
        return {
            name.removesuffix("_s"): (places, [none if one is None else getattr(one, name) * 1e3 for one in found])
            for name in PERCENTILES
        }

    shown: dict[str, dict[str, Points]] = {
        "tokens/s": {**speeds},
        "time to first token, ms": latencies([row.ttft for row in result.figures]),
        "inter-token latency, ms": latencies([row.itl for row in result.figures]),
    }
    loads = [row.point.value for row in result.figures]
    panels = [Panel(x=axis_name(result), y=unit, lines=lines, ticks=loads) for unit, lines in shown.items()]
    draw(panels, path, title=f"{result.model} at {result.url}", size=(15, 4.5))
