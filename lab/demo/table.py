"""The demo's last word: one table of everything that was measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.demo.answers import Comparison, shown_length
from outrider.lab.demo.burst import Wave
from outrider.lab.demo.kill import Kill

HEADINGS = ("what", "tokens/s off", "on", "on ÷ off", "tokens per verification", "what became of it")
NUM_FIGURES = 4


def rows(comparisons: Sequence[Comparison], waves: Sequence[Wave], kill: Kill) -> list[tuple[str, ...]]:
    """Return a row for each protocol, each wave and the kill."""
    return [
        *(_comparison_row(comparison) for comparison in comparisons),
        *(_wave_row(wave) for wave in waves),
        ("drafter killed", *[NOTHING] * NUM_FIGURES, kill.outcome),
    ]


def closing_table(comparisons: Sequence[Comparison], waves: Sequence[Wave], kill: Kill) -> Table:
    """Return the rows as a table, for a terminal as well as for a page."""
    table = Table(box=box.MARKDOWN)
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if 1 <= index <= NUM_FIGURES else "left")
    for row in rows(comparisons, waves, kill):
        table.add_row(*row)
    return table


def _comparison_row(comparison: Comparison) -> tuple[str, ...]:
    off_rate, on_rate = comparison.off_rate, comparison.on_rate
    ratio = f"{on_rate / off_rate:.2f}" if off_rate else NOTHING
    figures = (f"{off_rate:.0f}", f"{on_rate:.0f}", ratio, shown_length(comparison.tokens_per_verification))
    return (f"answers by {comparison.protocol} ({len(comparison.on)})", *figures, "the same text")


def _wave_row(wave: Wave) -> tuple[str, ...]:
    figures = (NOTHING, f"{wave.rate:.0f}", NOTHING, shown_length(wave.tokens_per_verification))
    return (f"burst of {wave.num_requests}", *figures, wave.fate())
