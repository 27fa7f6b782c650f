"""Draw what `outrider bench peers` found; needs the extra `plots`."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.figure import Figure

from outrider.lab.peers.report import PeersResult

BAR_SHARE = 0.8  # of the room between two engines
MAX_COLUMNS = 4  # loads side by side


def plot(result: PeersResult, path: Path) -> None:
    """Draw a bar for every peer at every load, as one PNG: tokens/s or ms, each load on a scale of its own."""
    names = [peer.name for peer in result.peers]
    num_columns = min(len(result.loads), MAX_COLUMNS)
    num_rows = math.ceil(len(result.loads) / num_columns)
    size = (4.2 * num_columns, (0.32 * len(names) + 1.4) * num_rows)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False)
    for spare in grid.flat[len(result.loads) :]:
        spare.set_axis_off()
    for axes, load in zip(grid.flat, result.loads, strict=False):
        values = [result.median(load, name) for name in names]
        colors = ["tab:orange" if name.startswith("Outrider") else "tab:gray" for name in names]
        bars = axes.barh(names, values, height=BAR_SHARE, color=colors)
        axes.bar_label(bars, [f"{value:.0f}" if value else "none" for value in values], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(load.name, fontsize=10)
        axes.set_xlabel("ms, smaller is better" if load.is_first_token else "tokens/s")
        if axes not in grid[:, 0]:
            axes.set_yticklabels([])
    figure.savefig(path, format="png", dpi=110)
