"""Draw what `outrider bench peers` found; needs the extra `plots`."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from outrider.cluster.peers.measure import median_speed
from outrider.cluster.peers.report import PeersResult

BAR_SHARE = 0.8  # of the room between two loads


def plot(result: PeersResult, path: Path) -> None:
    """Draw a bar for every peer at every load, as one PNG: tokens/s, each load on a scale of its own."""
    names = [peer.name for peer in result.peers]
    figure = Figure(figsize=(4.2 * len(result.loads), 0.32 * len(names) + 1.4), layout="constrained")
    for axes, load in zip(figure.subplots(1, len(result.loads), squeeze=False)[0], result.loads, strict=True):
        samples = result.measured.samples
        speeds = [median_speed(samples, name, load.name) if result.has(name, load) else 0.0 for name in names]
        colors = ["tab:orange" if name.startswith("Outrider") else "tab:gray" for name in names]
        bars = axes.barh(names, speeds, height=BAR_SHARE, color=colors)
        axes.bar_label(bars, [f"{speed:.0f}" if speed else "none" for speed in speeds], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_title(load.name, fontsize=10)
        axes.set_xlabel("tokens/s")
        if axes is not figure.axes[0]:
            axes.set_yticklabels([])
    figure.savefig(path, format="png", dpi=110)
