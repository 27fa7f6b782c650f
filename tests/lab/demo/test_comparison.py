"""What is said of an act: how fast it was without drafts and with them, and why."""

from __future__ import annotations

import pytest

from fakes.played import plain_answer, played_answer
from outrider.lab.demo.comparison import Comparison, paired
from outrider.lab.demo.questions import Question
from outrider.lab.same_tokens import Pair

PLAIN = plain_answer(11)
DRAFTED = plain_answer(11, every_s=0.05, num_drafts=4, num_draft_tokens=16, num_accepted_tokens=6)


def compared(off=(PLAIN,), on=(DRAFTED,), **fields) -> Comparison:
    return Comparison(what="answers", story="a story", off=off, on=on, **fields)


def test_one_by_one_their_decoding_counts():
    found = compared()
    assert found.rates == pytest.approx((10.0, 20.0))
    assert found.ratio == pytest.approx(2.0)
    assert found.tokens_per_verification == 2.5


def test_where_drafts_won_their_part_is_said():
    assert compared().why == "a story; 6 of 16 drafted tokens were right, in 80% of the steps"


def test_where_they_did_not_that_is_said():
    even = compared(on=(plain_answer(11, num_drafts=1, num_draft_tokens=4),))
    assert even.why == "a story; 0 of 4 drafted tokens were right, in 9% of the steps: no more than they cost"
    assert compared(off=(DRAFTED,), on=(plain_answer(11),)).why == "a story; nothing was drafted: less than they cost"


def test_why_they_were_stopped_is_said():
    on = (plain_answer(11, disabled_reason="load"), plain_answer(11, disabled_reason="load"), DRAFTED)
    assert compared(on=on).why.endswith("; stopped for 2 of 3: a draft token costs more than it brings")


def test_two_answers_to_a_question_are_a_pair_whatever_their_origin():
    question = Question(shown="why", path="/", fields={}, token_ids=(8, 9))
    pair = paired("HTTP: why", question, played_answer(("a", "plain")), played_answer(("bc", "accepted")))
    assert pair == Pair(what="HTTP: why", prompt=(8, 9), expected=[1], given=[2])
