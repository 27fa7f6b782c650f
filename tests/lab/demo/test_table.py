"""The closing table: one row for each thing that was measured."""

from __future__ import annotations

import io

from rich.console import Console

from fakes.played import plain_answer
from outrider.lab.demo.comparison import Comparison
from outrider.lab.demo.kill import Kill, Recovery
from outrider.lab.demo.table import HEADINGS, closing_table, rows

COMPARISON = Comparison(
    what="answers by HTTP (1)",
    story="new text",
    off=(plain_answer(11),),
    on=(plain_answer(11, every_s=0.05, num_drafts=4, num_draft_tokens=16, num_accepted_tokens=6),),
)
IDLE = Comparison(what="burst of 1", story="one", off=(plain_answer(1),), on=(plain_answer(1),))
KILL = Kill(answer=plain_answer(20), struck_s=0.5, recovery=Recovery(drafter_s=5.0, draft_s=8.5))


def test_rows_have_what_was_measured_and_nothing_else():
    assert rows([COMPARISON, IDLE], KILL) == [
        ("answers by HTTP (1)", "10", "20", "2.00", "2.50", COMPARISON.why),
        ("burst of 1", "0", "0", "-", "-", IDLE.why),
        ("drafter killed", "-", "-", "-", "-", KILL.outcome),
    ]


def test_the_table_is_markdown_as_well():
    written = io.StringIO()
    Console(file=written, width=200).print(closing_table([COMPARISON, IDLE], KILL))
    lines = [line.strip() for line in written.getvalue().splitlines() if line.strip()]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == list(HEADINGS)
    assert len(lines) == 2 + 3
