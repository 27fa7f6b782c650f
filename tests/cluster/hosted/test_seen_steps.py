"""A profile of step times from the steps that run."""

from __future__ import annotations

import pytest

from outrider.cluster.hosted.seen_steps import MAX_STEPS, MIN_STEPS, NUM_COLD_STEPS, SeenSteps
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.pricing.draft_pricing import DraftPricing


def warm() -> SeenSteps:
    seen = SeenSteps()
    for _ in range(NUM_COLD_STEPS):
        assert not seen.observe(1000, 9.0)
    return seen


def test_a_profile_is_there_once_enough_steps_differ_enough():
    seen = warm()
    sizes = [*[1] * (MIN_STEPS - 1), 2]
    assert [seen.observe(size, 0.01 * size) for size in sizes] == [False] * (MIN_STEPS - 1) + [True]
    assert seen.profile == tuple(StepTime(num_tokens=size, seconds=0.01 * size) for size in sizes)


def test_the_first_steps_do_not_count():
    seen = warm()
    for size in (1, 1, 1, 1, 2, 2, 2, 2):
        seen.observe(size, 0.01)
    assert max(point.seconds for point in seen.profile) == 0.01


def test_steps_that_are_all_alike_tell_nothing():
    seen = warm()
    assert not seen.are_alike
    for _ in range(2 * MAX_STEPS):
        assert not seen.observe(5, 0.02)
    assert seen.profile == ()
    assert seen.are_alike
    assert seen.observe(1, 0.02)
    assert not seen.are_alike
    assert len(seen.profile) == MAX_STEPS


def test_nothing_is_gathered_after_that():
    seen = warm()
    for size in (1, 1, 1, 1, 2, 2, 2, 2):
        seen.observe(size, 0.01)
    profile = seen.profile
    assert not seen.observe(64, 0.5)
    assert seen.profile == profile


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 0.01), (4, 0.0), (4, -0.01)])
def test_a_step_of_nothing_or_of_no_time_is_passed_over(num_tokens: int, seconds: float):
    seen = SeenSteps()
    for _ in range(NUM_COLD_STEPS + 2 * MIN_STEPS):
        assert not seen.observe(num_tokens, seconds)
    assert seen.observe(1, 0.01) is False
    assert not seen.are_alike


def test_what_was_seen_is_a_profile_that_prices_go_by():
    seen = warm()
    for size in (1, 9, 9, 9, 1, 9, 1, 9):
        seen.observe(size, 0.01 + 0.001 * size)
    pricing = DraftPricing()
    pricing.use_profile(seen.profile)
    assert pricing.price is not None
