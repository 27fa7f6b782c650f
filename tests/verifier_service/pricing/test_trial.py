from collections.abc import Sequence

import pytest

from fakes.priced_bench import ONE_CORE, FarBench, FarDrafts
from outrider.verifier_service.messages.engine import NEVER
from outrider.verifier_service.pricing.trial import (
    ALLOWANCE,
    FIRST_CREDIT,
    FIRST_PAUSE,
    MAX_ALLOWANCE,
    MAX_CREDIT,
    MAX_LOSS,
    MAX_PAUSE,
    PAUSE_GROWTH,
    TRIAL_DRAFTS,
    TRIAL_STEPS,
    Trial,
)

OPEN = 0.3  # a price that lets drafts through


def opened(*losses: float) -> Trial:
    """Return a trial with so many drafts behind it, each of which lost so many steps."""
    trial = Trial()
    assert trial.settle(0.0, OPEN, True) == OPEN
    for lost in losses:
        trial.observe(1, lost)
    return trial


def failed() -> Trial:
    """Return one that has lost all it may."""
    trial = opened(FIRST_CREDIT + MAX_LOSS)
    assert trial.settle(OPEN, OPEN, True) == NEVER
    return trial


def num_paused(trial: Trial) -> int:
    """Count the steps without drafts until it opens again."""
    count = 0
    while trial.settle(NEVER, OPEN, True) == NEVER:
        trial.observe_plain()
        count += 1
    return count


def test_dear_first_drafts_do_not_close_it():
    trial = opened(*[0.3] * (TRIAL_DRAFTS - 1))
    assert trial.settle(OPEN, NEVER, True) == OPEN
    assert trial.settle(OPEN, 0.5, True) == 0.5, "a price that lets some through is followed"


def test_after_enough_drafts_what_they_say_counts():
    trial = opened(*[0.0] * TRIAL_DRAFTS)
    assert not trial.goes_on
    assert trial.settle(OPEN, NEVER, True) == NEVER


def test_the_drafts_of_one_step_are_no_trial_yet():
    trial = opened()
    for _ in range(TRIAL_STEPS):
        assert trial.settle(OPEN, NEVER, True) == OPEN
        trial.observe(TRIAL_DRAFTS, 0.1)
    assert trial.settle(OPEN, NEVER, True) == NEVER


def test_too_much_lost_closes_it_whatever_past_steps_say():
    assert opened(FIRST_CREDIT + MAX_LOSS - 0.1).settle(OPEN, OPEN, True) == OPEN
    assert opened(FIRST_CREDIT + MAX_LOSS).settle(OPEN, OPEN, True) == NEVER


def test_what_is_lost_after_a_trial_counts_too():
    trial = opened(*[0.0] * TRIAL_DRAFTS)
    trial.observe(1, FIRST_CREDIT + MAX_LOSS - 0.25)
    assert trial.settle(OPEN, OPEN, True) == OPEN
    trial.observe(1, 0.25)
    assert trial.settle(OPEN, OPEN, True) == NEVER


def test_what_was_gained_may_be_lost_up_to_a_credit():
    trial = opened(-1000.0, MAX_CREDIT + MAX_LOSS - 0.25)
    assert trial.settle(OPEN, OPEN, True) == OPEN
    trial.observe(1, 0.25)
    assert trial.settle(OPEN, OPEN, True) == NEVER


def test_drafts_that_would_not_pay_if_they_came_at_once_are_not_tried():
    assert opened().settle(OPEN, NEVER, False) == NEVER


def test_pauses_grow_with_every_failure_until_drafting_has_gained():
    trial = failed()
    for length in (FIRST_PAUSE, FIRST_PAUSE * PAUSE_GROWTH, MAX_PAUSE, MAX_PAUSE):
        assert num_paused(trial) == length
        trial.observe(1, MAX_LOSS)
        assert trial.settle(OPEN, OPEN, True) == NEVER, "later trials may lose less than the first"
    num_paused(trial)
    trial.observe(1, -2 * MAX_CREDIT)
    trial.observe(1, MAX_CREDIT + MAX_LOSS)
    assert trial.settle(OPEN, OPEN, True) == NEVER
    assert num_paused(trial) == FIRST_PAUSE


def test_accidents_are_pardoned_as_far_as_the_allowance_reaches():
    trial = opened()
    trial.observe(1, MAX_ALLOWANCE, is_accident=True)
    assert trial.settle(OPEN, OPEN, True) == OPEN
    assert trial.allowance == 0.0
    trial.observe(1, FIRST_CREDIT + MAX_LOSS, is_accident=True)
    assert trial.settle(OPEN, OPEN, True) == NEVER
    for _ in range(1000):
        trial.observe_plain()
    assert trial.allowance == pytest.approx(1000 * ALLOWANCE)


def speeds(share_wrong: float, cold_s: Sequence[float]) -> list[float]:
    """Return tokens per second by those of plain decoding, four requests of one stream each."""
    drafts = FarDrafts(level_s=0.003, fixed_s=0.003, opening_s=0.02, cold_s=cold_s, share_wrong=share_wrong)
    bench = FarBench(drafts, ONE_CORE, contention=0.3)
    off = bench.speed(1, num_requests=4, draft_length=0, is_pinned=True)
    return [bench.speed(1, num_requests=4) / off for _ in range(16)]


@pytest.mark.parametrize("share_wrong", [0.15, 0.3])
def test_a_cold_start_does_not_keep_drafts_off(share_wrong: float):
    """After a drafter's first ten answers, which take more than a step of the verifier's each, drafts pay."""
    found = speeds(share_wrong, [0.02] * 10)
    assert sum(found[8:]) / 8 > 1.15
    assert min(found) > 0.93


def test_trying_again_and_again_costs_little():
    found = speeds(0.6, [])  # the best fixed length loses a tenth
    assert sum(found) / len(found) > 0.975


def test_drafts_that_hardly_pay_cost_little_for_long():
    """Where a price cannot quite tell, luck is what opens it."""
    found: list[float] = []
    for concurrency, share_wrong, waits in (
        (2, 0.5, {"fixed_s": 0.008, "level_s": 0.001}),
        (4, 0.4, {"fixed_s": 0.008, "level_s": 0.001}),
        (4, 0.5, {"fixed_s": 0.001, "level_s": 0.004}),
    ):
        drafts = FarDrafts(**waits, opening_s=0.004, share_wrong=share_wrong, share_told=0.8)
        bench = FarBench(drafts, ONE_CORE, contention=0.2)
        off = bench.speed(concurrency, num_requests=8, draft_length=0, is_pinned=True)
        found.append(bench.speed(concurrency, num_requests=320) / off)
    assert sum(found) / len(found) > 0.985, "of trials' losses alone, and by history, 0.980 of 0.990"
