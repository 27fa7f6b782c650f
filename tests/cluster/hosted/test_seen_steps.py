"""A profile of step times from the steps that run."""

from __future__ import annotations

import pytest

from outrider.cluster.hosted.seen_steps import MAX_SAMPLES, MIN_GAP, MIN_SAMPLES, MIN_STEPS, SeenSteps
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.pricing.draft_pricing import DraftPricing


def observe(seen: SeenSteps, num_tokens: int, seconds: float, count: int, *, has_prompts: bool = False) -> list[bool]:
    return [seen.observe(num_tokens, seconds, has_prompts=has_prompts) for _ in range(count)]


def test_a_profile_is_there_once_two_sizes_were_seen_often_enough():
    seen = SeenSteps()
    observe(seen, 1, 0.01, 10)
    assert observe(seen, 5, 0.02, MIN_SAMPLES) == [False] * (MIN_SAMPLES - 1) + [True]
    assert seen.profile == (StepTime(num_tokens=1, seconds=0.01), StepTime(num_tokens=5, seconds=0.02))


def test_prompts_tell_what_comes_far_beyond_but_never_what_a_few_tokens_cost():
    seen = SeenSteps()
    observe(seen, 1, 0.01, 10)
    assert not any(observe(seen, 40, 9.0, 10, has_prompts=True)), "cold steps over prompts would make tokens dear"
    observe(seen, 5, 0.011, MIN_SAMPLES)
    assert [point.num_tokens for point in seen.profile] == [1, 5, 40]
    pricing = DraftPricing()
    pricing.use_profile(seen.profile)
    assert pricing.cost is not None
    assert pricing.cost.knee() >= 5


def test_a_cold_step_and_a_stall_are_not_what_steps_take():
    seen = SeenSteps()
    for seconds in (9.0, 0.01, 0.01, 0.01, 4.0):
        seen.observe(1, seconds)
    observe(seen, 2, 0.02, MIN_SAMPLES)
    assert seen.profile == (StepTime(num_tokens=1, seconds=0.01), StepTime(num_tokens=2, seconds=0.02))


def test_steps_that_are_all_alike_tell_nothing_and_want_plain_ones():
    seen = SeenSteps()
    assert not seen.wants_plain
    assert not any(observe(seen, 5, 0.02, 100))
    assert seen.wants_plain
    observe(seen, 1, 0.02, MIN_SAMPLES)
    assert seen.profile
    assert not seen.wants_plain


def test_a_size_that_is_seen_later_comes_in_but_not_with_every_step():
    seen = SeenSteps()
    observe(seen, 1, 0.01, MIN_SAMPLES)
    observe(seen, 5, 0.01, MIN_SAMPLES)
    changes = [*observe(seen, 20, 0.03, MIN_GAP), *observe(seen, 40, 0.06, MIN_GAP)]
    assert [index + 1 for index, has_changed in enumerate(changes) if has_changed] == [MIN_GAP, 2 * MIN_GAP]
    assert [point.num_tokens for point in seen.profile] == [1, 5, 20, 40]


def test_a_machine_that_has_become_slower_is_seen_and_profiles_become_rare():
    seen = SeenSteps()
    observe(seen, 1, 0.01, MIN_STEPS)
    observe(seen, 5, 0.01, MIN_SAMPLES)
    changes = []
    for _ in range(2000):
        changes += [seen.observe(1, 0.03), seen.observe(5, 0.04)]
    assert seen.profile == (StepTime(num_tokens=1, seconds=0.03), StepTime(num_tokens=5, seconds=0.04))
    assert 4 <= sum(changes) <= 10
    assert MAX_SAMPLES < MIN_GAP * 2


def test_steps_of_about_one_size_are_one_point():
    seen = SeenSteps()
    observe(seen, 1, 0.01, MIN_SAMPLES)
    for num_tokens in (100, 101, 103):
        seen.observe(num_tokens, 0.05)
    assert [point.num_tokens for point in seen.profile] == [1, 101]


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 0.01), (4, 0.0), (4, -0.01)])
def test_a_step_of_nothing_or_of_no_time_is_passed_over(num_tokens: int, seconds: float):
    seen = SeenSteps()
    assert not any(observe(seen, num_tokens, seconds, 4 * MIN_STEPS))
    assert not seen.wants_plain
