"""What is said of a wave, from responses that were played."""

from __future__ import annotations

from collections import Counter

import pytest

from fakes.played import plain_answer
from outrider.lab.demo.burst import BUDGET_S, FEWEST_TOKENS, MOST_TOKENS, Wave, answer_length


def drafting(reason: str | None = None):
    return plain_answer(10, num_drafts=4, num_draft_tokens=16, num_accepted_tokens=2, disabled_reason=reason)


def test_drafts_that_stayed():
    wave = Wave(answers=(drafting(), drafting()), seconds=2.0)
    assert wave.rate == 10.0
    assert wave.drafting_share == 0.5  # 2 x 4 drafts in 2 x (10 - 2) steps
    assert wave.tokens_per_verification == 1.5
    assert wave.summary == (
        "2 requests: 10 tokens/s; 2 of them drafted, in 50% of all steps; drafts stayed; the router decided nothing new"
    )


def test_drafts_that_were_taken_away_with_the_reasons():
    answers = (drafting(), drafting("load"), plain_answer(10, disabled_reason="load"), drafting("draft_queue"))
    wave = Wave(answers=answers, seconds=1.0, decisions=Counter({"off: load": 2, "on: pays": 5}))
    assert wave.fate() == "drafts were taken away from 3 of 4 requests: load 2, draft_queue 1"
    assert wave.num_drafting == 3
    assert "load 2 (a draft token costs more than it brings), draft_queue 1 (drafts come too late)" in wave.summary
    assert wave.summary.endswith("the router decided on: pays 5, off: load 2")


def test_a_wave_without_drafts_has_no_figure_of_them():
    assert Wave(answers=(plain_answer(4),), seconds=1.0).tokens_per_verification is None


@pytest.mark.parametrize(
    ("num_requests", "rate", "length"),
    [
        (4, None, MOST_TOKENS),
        (64, 10_000.0, MOST_TOKENS),
        (128, 128 * 16 / BUDGET_S, 16),
        (256, 10.0, FEWEST_TOKENS),
    ],
)
def test_a_wave_is_as_long_as_the_one_before_allows(num_requests: int, rate: float | None, length: int):
    assert answer_length(num_requests, rate) == length
