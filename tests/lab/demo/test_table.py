"""The closing table: one row for each thing that was measured."""

from __future__ import annotations

import io

from rich.console import Console

from fakes.played import plain_answer
from outrider.lab.demo.answers import Comparison
from outrider.lab.demo.burst import Wave
from outrider.lab.demo.kill import Kill, Recovery
from outrider.lab.demo.table import HEADINGS, closing_table, rows

COMPARISON = Comparison(
    protocol="HTTP",
    off=(plain_answer(11),),
    on=(plain_answer(11, every_s=0.05, num_drafts=4, num_draft_tokens=16, num_accepted_tokens=6),),
)
WAVE = Wave(answers=(plain_answer(10, disabled_reason="load"),) * 4, seconds=0.5)
KILL = Kill(answer=plain_answer(20), struck_s=0.5, recovery=Recovery(drafter_s=5.0, draft_s=8.5))


def test_rows_have_what_was_measured_and_nothing_else():
    assert rows([COMPARISON], [WAVE], KILL) == [
        ("answers by HTTP (1)", "10", "20", "2.00", "2.50", "the same text"),
        ("burst of 4", "-", "80", "-", "-", "drafts were taken away from 4 of 4 requests: load 4"),
        ("drafter killed", "-", "-", "-", "-", KILL.outcome),
    ]


def test_a_ratio_needs_both_sides():
    idle = Comparison(protocol="gRPC", off=(plain_answer(1),), on=(plain_answer(1),))
    assert rows([idle], [], KILL)[0][1:5] == ("0", "0", "-", "-")


def test_the_table_is_markdown_as_well():
    written = io.StringIO()
    Console(file=written, width=160).print(closing_table([COMPARISON], [WAVE], KILL))
    lines = [line.strip() for line in written.getvalue().splitlines() if line.strip()]
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == list(HEADINGS)
    assert len(lines) == 2 + 3


def test_a_comparison_says_what_drafts_brought_even_where_they_lost():
    slower = Comparison(protocol="HTTP", off=COMPARISON.on, on=COMPARISON.off)
    assert "20 tokens/s off, 10 on; 0 of 0 draft tokens accepted, - tokens per verification" in slower.summary
    assert "6 of 16 draft tokens accepted, 2.50 tokens per verification" in COMPARISON.summary
