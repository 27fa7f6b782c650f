"""Lines over loads or time, side by side in one PNG; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Points = tuple[Sequence[float], Sequence[float]]  # x and y


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One diagram."""

    x: str
    y: str
    lines: Mapping[str, Points]
    ticks: Sequence[str] = ()  # names of x = 0, 1, ..; (): x are numbers
    steps: frozenset[str] = frozenset()  # lines that hold their value until the next point
    dashed: frozenset[str] = frozenset()
    bold: frozenset[str] = frozenset()
    marker: str | None = "o"


def draw(panels: Sequence[Panel], path: Path, *, title: str = "", size: tuple[float, float], rows: int = 1) -> None:
    """Draw the panels, from left to right in so many rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, len(panels) // rows, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=True):
        for name, (xs, ys) in panel.lines.items():
            axes.plot(
                xs,
                ys,
                "--" if name in panel.dashed else "-",
                drawstyle="steps-post" if name in panel.steps else "default",
                linewidth=3.0 if name in panel.bold else None,
                marker=panel.marker,
                label=name,
            )
        if panel.ticks:
            axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, format="png", dpi=110)
