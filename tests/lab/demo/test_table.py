"""The closing table: one row for each thing that was measured."""

from __future__ import annotations

import dataclasses
import io

import click
import pytest
from rich.console import Console

from fakes.played import FakeReference, plain_answer
from outrider.lab.demo.comparison import Comparison
from outrider.lab.demo.kill import Kill, Recovery
from outrider.lab.demo.show import close
from outrider.lab.demo.table import rows
from outrider.lab.same_tokens import Pair

COMPARISON = Comparison(
    what="answers by HTTP (1)",
    story="new text",
    off=(plain_answer(11),),
    on=(plain_answer(11, every_s=0.05, num_drafts=4, num_draft_tokens=16, num_accepted_tokens=6),),
)
IDLE = Comparison(what="burst of 1", story="one", off=(plain_answer(1),), on=(plain_answer(1),))
PAIR = Pair(what="killed", prompt=(1,), expected=(5,) * 20, given=(5,) * 20)
KILL = Kill(answer=plain_answer(20), pair=PAIR, struck_s=0.5, recovery=Recovery(drafter_s=5.0, draft_s=8.5))


def test_rows_have_what_was_measured_and_nothing_else():
    assert rows([COMPARISON, IDLE], KILL) == [
        ("answers by HTTP (1)", "10", "20", "2.00", "2.50", COMPARISON.why),
        ("burst of 1", "0", "0", "-", "-", IDLE.why),
        ("drafter killed", "-", "-", "-", "-", KILL.outcome),
    ]


def closed(pair: Pair, reference: FakeReference) -> tuple[str, str]:
    """Return what is printed, and the error that follows."""
    written, error = io.StringIO(), ""
    try:
        acts = [dataclasses.replace(COMPARISON, pairs=(PAIR,) * 12 + (pair,))], KILL
        close(Console(file=written, width=200), *acts, took="9 s", load=lambda: reference)
    except click.ClickException as raised:
        error = raised.message
    return written.getvalue(), error


def test_the_table_is_closed_by_what_drafts_changed():
    said, error = closed(PAIR, FakeReference())
    assert (said.splitlines()[-1], error) == ("drafts on and off: all 14 answers are identical", "")


def test_a_near_tie_is_said_and_is_no_error_where_it_may_tip():
    tipped = dataclasses.replace(PAIR, given=(5,) * 19 + (6,))
    said, error = closed(tipped, FakeReference(otherwise=0.001, may_tip=True))
    assert (said.splitlines()[-1], error) == ("drafts on and off: 1 of 14 answers tipped at a near tie", "")


@pytest.mark.parametrize("reference", [FakeReference(otherwise=0.1, may_tip=True), FakeReference(otherwise=0.0)])
def test_a_difference_is_an_error_after_the_table(reference: FakeReference):
    said, error = closed(dataclasses.replace(PAIR, what="HTTP: why", given=(5, 7)), reference)
    assert "| drafter killed " in said
    assert "HTTP: why: token 2 differs" in error
    assert "here: '5 7'" in error
