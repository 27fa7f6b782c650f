"""What the arms of the study of survival see, and how they are judged."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.draft_lengths.survival import ARMS, Round, less_than_today, losses, recorded_rounds, rows_of
from outrider.lab.replay.traces import Trace


def drawn(rng: random.Random, rate: float) -> Round:
    num_accepted = next((place for place in range(4) if rng.random() > rate), 4)
    return Round(4, num_accepted, None)


def test_a_recorded_round_ends_where_the_next_begins():
    trace = Trace(prompt_ids=[1], generated_ids=[1] * 20, recorded={"eagle": [3, 9, 9, 1, 12, *[1] * 15]})
    found = list(recorded_rounds(trace))
    assert [one.num_accepted for one in found[:2]] == [2, 0]
    assert found[0].num_judged == 3


def test_every_arm_learns_the_rate_that_there_is():
    rng = random.Random(1)
    requests = [[drawn(rng, 0.9) for _ in range(20)] for _ in range(20)]
    found = losses(requests)
    assert set(found) == set(ARMS)
    entropy = -(0.9 * np.log(0.9) + 0.1 * np.log(0.1))
    for sums in found.values():
        assert sums.shape == (16, 3)  # a fifth has chosen the step sizes
        assert sums[:, 0].sum() / sums[:, 2].sum() == pytest.approx(entropy, abs=0.06)


def test_the_outcome_of_the_round_before_helps_those_who_look():
    """Rounds in pairs: the second is as the first."""
    rng = random.Random(2)
    requests = [[Round(1, int(rng.random() < 0.5), None) for _ in range(15)] for _ in range(30)]
    requests = [[one for one in rounds for _ in range(4)] for rounds in requests]
    found = losses(requests)
    gain, low, _ = less_than_today(found["logistic"], found["today"], 0)
    assert gain > low > 0.0


def test_a_table_has_every_drafter_and_arm():
    rng = random.Random(3)
    traces = [
        Trace(
            prompt_ids=[rng.randrange(9) for _ in range(20)],
            generated_ids=[rng.randrange(9) for _ in range(40)],
            recorded={"eagle": [1 + rng.randrange(4) for _ in range(40)]},
        )
        for _ in range(12)
    ]
    assert len(rows_of("played", traces)) == 9
