"""The demo's last word: one table of everything that was measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from outrider.cluster.common.terminal import NOTHING
from outrider.lab.demo.comparison import Comparison
from outrider.lab.demo.kill import Kill

HEADINGS = ("what", "tokens/s off", "on", "on ÷ off", "tokens per verification", "why")
NUM_FIGURES = 4


def rows(comparisons: Sequence[Comparison], kill: Kill) -> list[tuple[str, ...]]:
    """Return a row for each comparison and the kill."""
    return [
        *(_comparison_row(comparison) for comparison in comparisons),
        ("drafter killed", *[NOTHING] * NUM_FIGURES, kill.outcome),
    ]


def closing_table(comparisons: Sequence[Comparison], kill: Kill) -> Table:
    """Return the rows as a table, for a terminal as well as for a page."""
    table = Table(box=box.MARKDOWN)
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if 1 <= index <= NUM_FIGURES else "left")
    for row in rows(comparisons, kill):
        table.add_row(*row)
    return table


def _comparison_row(comparison: Comparison) -> tuple[str, ...]:
    off_rate, on_rate = comparison.rates
    ratios = (comparison.ratio, comparison.tokens_per_verification)
    figures = (f"{off_rate:.0f}", f"{on_rate:.0f}", *(NOTHING if one is None else f"{one:.2f}" for one in ratios))
    return (comparison.what, *figures, comparison.why)
