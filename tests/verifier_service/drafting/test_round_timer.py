import random

import pytest

from outrider.verifier_service.drafting.round_timer import LateShare, RoundTimer


def make_timer() -> RoundTimer:
    return RoundTimer(first_s=1.0, min_s=0.002, max_s=0.5)


def test_steady_rounds_bring_the_deadline_near_the_round_time():
    timer = make_timer()
    for _ in range(100):
        timer.observe(0.010)
    assert 0.010 <= timer.deadline_s < 0.0105


def test_varying_rounds_get_more_patience_than_steady_ones():
    steady, varying = make_timer(), make_timer()
    for index in range(100):
        steady.observe(0.010)
        varying.observe(0.005 if index % 2 else 0.015)
    assert varying.deadline_s > 0.015 > steady.deadline_s


def test_nearly_all_rounds_are_answered_by_the_latest_time():
    timer, rng = make_timer(), random.Random(0)
    rounds_s = [rng.gauss(0.010, 0.002) for _ in range(400)]
    num_within = 0
    for seconds in rounds_s:
        num_within += seconds <= timer.latest_s
        timer.observe(seconds)
        assert timer.latest_s <= timer.deadline_s
    assert 0.85 < num_within / len(rounds_s) < 0.99


def test_missed_rounds_double_the_deadline_up_to_its_bound_until_one_is_answered():
    timer = make_timer()
    for _ in range(100):
        timer.observe(0.010)
    usual_s = timer.deadline_s
    timer.back_off()
    assert timer.deadline_s == 2 * usual_s
    for _ in range(20):
        timer.back_off()
    assert timer.deadline_s == 0.5
    timer.observe(0.010)
    assert timer.deadline_s < 2 * usual_s


def test_one_that_has_never_answered_still_gets_the_least_time():
    timer = make_timer()
    for _ in range(3):
        timer.back_off()
    assert timer.deadline_s == 1.0 / 8
    for _ in range(100):
        timer.back_off()
    assert timer.deadline_s == 1.0 / 64
    patient = RoundTimer(first_s=1.0, min_s=0.25, max_s=1.0)
    for _ in range(100):
        patient.back_off()
    assert patient.deadline_s == 0.25


def test_one_that_was_ever_so_fast_may_get_slow():
    timer = RoundTimer(first_s=1.0, min_s=0.02, max_s=1.0)
    for _ in range(200):
        timer.observe(1e-3)
    for _ in range(100):
        timer.back_off()
    assert timer.deadline_s == 1.0


def test_deadline_has_a_floor():
    timer = make_timer()
    for _ in range(200):
        timer.observe(1e-5)
    assert timer.deadline_s == 0.002


@pytest.mark.parametrize("num_requests", [1, 32])
def test_the_share_of_late_drafts_is_that_of_all_requests(num_requests: int):
    share = LateShare()
    for place in range(400):  # 4 s; every fourth round is late, for all alike
        for _ in range(num_requests):
            share.observe(0.01 * place, is_late=place % 4 == 0)
    assert share.share_at(4.0) == pytest.approx(0.25, abs=0.01)


def test_a_drafter_that_was_late_and_is_not_asked_any_more_gets_another_chance():
    share = LateShare()
    assert share.share_at(5.0) == 0.0
    for _ in range(100):
        share.observe(10.0, is_late=True)
    shares = [share.share_at(10.0 + seconds) for seconds in (0.0, 20.0, 40.0, 80.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.95
    assert shares[-1] < 0.02
