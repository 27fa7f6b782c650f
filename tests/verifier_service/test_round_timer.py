import random

import pytest

from outrider.verifier_service.round_timer import RoundTimer


def make_timer() -> RoundTimer:
    return RoundTimer(first_s=1.0, min_s=0.002, max_s=0.5)


def test_first_deadline_is_the_configured_one():
    assert make_timer().deadline_s == 1.0


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


def test_the_share_of_late_rounds_is_known_and_fades():
    timer = make_timer()
    for _ in range(40):  # every second one misses its deadline, and is heard of later
        timer.observe(0.01)
        timer.back_off()
        timer.observe(0.03, is_late=True)
    assert timer.late_share == pytest.approx(0.5, abs=0.05)
    for _ in range(40):
        timer.observe(0.01)
    assert timer.late_share < 0.01
