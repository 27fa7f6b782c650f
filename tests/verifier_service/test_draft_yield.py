from __future__ import annotations

import pytest

from outrider.verifier_service.draft_yield import MEMORY_S, MIN_ROUNDS, DraftYield


def after_rounds(num_rounds: int, *, accepted: int, now_s: float = 0.0) -> DraftYield:
    """`accepted`: in each."""
    found = DraftYield()
    found.observe_rounds(num_rounds, now_s)
    found.observe_accepted(accepted * num_rounds, now_s)
    return found


def test_few_rounds_say_nothing():
    few = int(MIN_ROUNDS) - 1
    assert after_rounds(few, accepted=3).at(0.0) is None
    assert after_rounds(few + 1, accepted=3).at(0.0) == 3.0


def test_rounds_in_which_nothing_is_accepted_count():
    found = after_rounds(16, accepted=2)
    found.observe_rounds(16, 0.0)
    assert found.at(0.0) == 1.0


def test_newer_rounds_count_more_and_old_ones_are_forgotten():
    found = after_rounds(100, accepted=4)
    found.observe_rounds(100, MEMORY_S)
    assert found.at(MEMORY_S) == pytest.approx(4.0 * 0.368 / 1.368, rel=1e-3)
    assert found.at(MEMORY_S * 10) is None


def test_a_clock_that_stands_still_or_is_set_back_loses_nothing():
    found = after_rounds(16, accepted=1, now_s=50.0)
    assert found.at(40.0) == 1.0
