"""The arithmetic of the study `drift`."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.weights.drift import (
    NUM_BUCKETS,
    NUM_COMPARED,
    Answered,
    Arm,
    gain_of,
    pairs_of,
    tokens_per_verification,
)
from benchmarks.weights.served_model import Told
from outrider.lab.same_tokens import Seeded

TOLD = Told(prompt=(1,), token_ids=(2, 3))


def answered(**fields: Any) -> Answered:
    return Answered(
        **{"end_s": 0.0, "num_tokens": 2, "num_accepted": 0, "seconds": 1.0, "number": 0, "told": TOLD, **fields}
    )


def answers(seconds: float, lengths: list[float], num: int = 10) -> list[Answered]:
    """Answers of about so many tokens per verification in each bucket."""
    chance = random.Random(0)
    found = []
    for index, length in enumerate(lengths):
        for place in range(num):
            rounds = 40 + chance.randrange(5)
            tokens = int(rounds * length)
            end_s = (index + (place + 0.5) / num) * seconds / len(lengths)
            found.append(answered(end_s=end_s, num_tokens=tokens, num_accepted=tokens - rounds))
    return found


def test_a_gain_and_when_nine_tenths_of_it_were_reached():
    rising = [1.5, 1.6, 1.8] + [2.5] * (NUM_BUCKETS - 3)
    found = gain_of(answers(120.0, rising), 120.0)
    assert found.is_real
    assert found.last - found.first == pytest.approx(1.0, abs=0.05)
    assert found.reached_s == pytest.approx(4 * 120.0 / NUM_BUCKETS)


def test_what_lies_within_noise_is_no_gain():
    found = gain_of(answers(120.0, [2.0] * NUM_BUCKETS), 120.0)
    assert not found.is_real
    assert found.reached_s is None


def test_tokens_per_verification_weighs_rounds_not_answers():
    long = answered(num_tokens=90, num_accepted=60)
    short = answered(num_tokens=10)
    assert tokens_per_verification([long, short]) == 100 / 40


def test_the_first_answers_of_each_kind_are_held_against_those_of_the_arm_that_does_not_learn():
    late, other = answered(number=NUM_COMPARED), answered(number=1, told=Told(prompt=(1,), token_ids=(2, 4)))
    arms = {"off": Arm(([answered(), late], [answered(number=1)])), "on": Arm(([answered()], [other, late]))}
    pairs = [pair for pair in pairs_of(arms, 0.8) if pair.what.startswith("on")]
    assert [pair.what for pair in pairs] == ["on, kind A, prompt 0", "on, kind B, prompt 1"]
    assert (pairs[1].expected, pairs[1].given, pairs[1].seeded) == ((2, 3), (2, 4), Seeded(seed=1, temperature=0.8))
