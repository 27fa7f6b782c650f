import random

import pytest

from outrider.verifier_service.exposure import DraftExposure


def exposed(*rounds: tuple[int, float]) -> DraftExposure:
    exposure = DraftExposure()
    for length, seconds in rounds:
        exposure.observe(length, seconds)
    return exposure


def test_nothing_is_known_at_first():
    assert exposed().seconds(8) == 0.0


def test_rounds_of_one_length_are_taken_to_be_proportional():
    exposure = exposed(*[(4, 0.020)] * 50)
    assert exposure.level_s == pytest.approx(0.005)
    assert exposure.fixed_s == pytest.approx(0.0, abs=1e-9)


def test_lengths_that_vary_tell_the_round_trip_from_the_drafting():
    rng = random.Random(1)
    lengths = [rng.randint(1, 8) for _ in range(200)]
    exposure = exposed(*((length, 0.010 + 0.002 * length) for length in lengths))
    assert exposure.fixed_s == pytest.approx(0.010, rel=0.25)
    assert exposure.level_s == pytest.approx(0.002, rel=0.25)
    assert exposure.seconds(5) == pytest.approx(0.020, rel=0.1)


def test_neither_part_is_negative():
    shorter = exposed(*((length, 0.010 - 0.001 * length) for length in (1, 8) * 30))
    assert shorter.level_s == 0.0
    dearer = exposed(*((length, 0.001 * length * length) for length in (1, 8) * 30))
    assert dearer.fixed_s >= 0.0


def test_it_forgets():
    exposure = exposed(*[(4, 0.100)] * 100, *[(4, 0.0)] * 100)
    assert exposure.seconds(4) < 0.002
