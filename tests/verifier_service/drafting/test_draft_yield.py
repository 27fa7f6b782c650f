from __future__ import annotations

import pytest

from outrider.verifier_service.drafting.draft_yield import MIN_ROUNDS, RETRY_STEPS, DraftYield


def after_rounds(num_rounds: int, *, accepted: int, step: int = 0) -> DraftYield:
    """`accepted`: in each."""
    found = DraftYield()
    for _ in range(num_rounds):
        found.observe_rounds(1, step)
        found.observe_accepted(accepted)
    return found


def test_few_rounds_say_nothing():
    few = int(MIN_ROUNDS)
    assert after_rounds(few, accepted=3).mean_at(0) is None, "they fade a little"
    assert after_rounds(few + 2, accepted=3).mean_at(0) == pytest.approx(3.0, rel=0.01)


def test_rounds_in_which_nothing_is_accepted_count():
    found = after_rounds(20, accepted=2)
    found.observe_rounds(20, 1)
    assert found.mean_at(1) == pytest.approx(2.0 * 0.855 * 18.6 / 36, rel=0.05)


def test_newer_rounds_count_more():
    found = after_rounds(1000, accepted=4)
    assert found.mean_at(0) == pytest.approx(4.0, rel=0.01)
    for _ in range(400):
        found.observe_rounds(1, 0)
    assert found.mean_at(0) < 0.3


def test_what_is_known_is_forgotten_after_many_steps_and_then_begins_anew():
    found = after_rounds(100, accepted=4)
    assert found.mean_at(RETRY_STEPS) is not None
    assert found.mean_at(RETRY_STEPS + 1) is None
    found.observe_rounds(20, RETRY_STEPS + 1)
    assert found.mean_at(RETRY_STEPS + 1) == 0.0
