import random
from collections.abc import Sequence

import numpy as np
import pytest

from outrider.verifier_service.pricing import survival
from outrider.verifier_service.pricing.request_table import RequestTable
from outrider.verifier_service.pricing.survival import INITIAL_HAZARD, MAX_POOLS, bins_of_rows


class SurvivalEstimator:
    """The estimator, for one request at a time."""

    def __init__(self) -> None:
        self.table = RequestTable()
        self.all = survival.SurvivalEstimator(self.table)

    def survivals(self, request_id: str, drafter_id: str, length: int, confidences=None, **named) -> list[float]:
        bins = None if confidences is None else bins_of_rows([confidences[:length]], length)
        rows, drafter = self.table.find([request_id]), self.all.number_of(drafter_id)
        return self.all.survivals(rows, drafter, length, bins, **named)[0].tolist()

    def end_round(self, request_id: str, drafter_id: str, num_draft_tokens: int, num_accepted_tokens: int):
        counts = np.array([min(num_accepted_tokens + 1, num_draft_tokens)]), np.array([num_accepted_tokens])
        rows, drafter = self.table.rows([request_id]), self.all.number_of(drafter_id)
        return rows, drafter, *counts, self.all.end_rounds(rows, drafter, *counts)

    def observe(self, *which: str, num_draft_tokens: int, num_accepted_tokens: int, confidences=None) -> None:
        ended = self.end_round(*which, num_draft_tokens, num_accepted_tokens)
        self.all.observe(*ended, None if confidences is None else bins_of_rows([confidences], num_draft_tokens))

    def observe_plain(self, request_id: str) -> None:
        self.all.observe_plain(self.table.find([request_id]))


def play(
    estimator: SurvivalEstimator,
    rng: random.Random,
    rates: Sequence[float],
    *,
    request_id: str = "r",
    drafter_id: str = "d",
    num_rounds: int = 300,
) -> None:
    """Verify drafts whose positions are accepted at `rates`, given that all before them are."""
    for _ in range(num_rounds):
        num_accepted = next((place for place, rate in enumerate(rates) if rng.random() >= rate), len(rates))
        estimator.observe(request_id, drafter_id, num_draft_tokens=len(rates), num_accepted_tokens=num_accepted)


def test_nothing_is_known_at_first():
    survivals = SurvivalEstimator().survivals("r", "d", 3)
    assert survivals == pytest.approx([(1 - INITIAL_HAZARD) ** power for power in (1, 2, 3)])
    assert SurvivalEstimator().survivals("r", "d", 0) == []


def test_each_position_has_a_rate_of_its_own():
    estimator = SurvivalEstimator()
    play(estimator, random.Random(1), (0.9, 0.5, 0.9), num_rounds=1500)
    survivals = estimator.survivals("newcomer", "d", 4)
    assert survivals[:3] == pytest.approx([0.9, 0.45, 0.405], abs=0.05)
    assert survivals[3] == pytest.approx(survivals[2] ** 2 / survivals[1]), "as the last one that was judged"


def test_a_request_differs_from_its_pool_after_a_few_rounds():
    estimator, rng = SurvivalEstimator(), random.Random(2)
    for index in range(200):
        play(estimator, rng, (0.6, 0.6), request_id=str(index), num_rounds=2)
    pooled = estimator.survivals("newcomer", "d", 1)[0]
    play(estimator, rng, (1.0, 1.0), request_id="copies", num_rounds=20)
    play(estimator, rng, (0.0, 0.0), request_id="rambles", num_rounds=20)
    assert pooled == pytest.approx(0.6, abs=0.06)
    assert estimator.survivals("copies", "d", 1)[0] > 0.8
    assert estimator.survivals("rambles", "d", 1)[0] < 0.3


def test_a_request_that_changes_is_followed():
    estimator, rng = SurvivalEstimator(), random.Random(3)
    play(estimator, rng, (0.6, 0.6), request_id="others", num_rounds=500)
    play(estimator, rng, (0.0, 0.0), num_rounds=60)
    low = estimator.survivals("r", "d", 1)[0]
    play(estimator, rng, (1.0, 1.0), num_rounds=60)
    assert low < 0.3 < 0.8 < estimator.survivals("r", "d", 1)[0]


def test_drafters_are_kept_apart_and_a_new_one_is_taken_for_the_others():
    estimator, rng = SurvivalEstimator(), random.Random(4)
    play(estimator, rng, (0.95,), drafter_id="good", request_id="a")
    play(estimator, rng, (0.1,), drafter_id="bad", request_id="b")
    good, bad, new = (estimator.survivals("newcomer", drafter_id, 1)[0] for drafter_id in ("good", "bad", "new"))
    assert bad < 0.2 < new < 0.8 < good


def test_confidences_mean_what_has_come_of_them():
    """Positions claimed at 0.9 are accepted half of the time, those claimed at 0.3 always."""
    estimator, rng = SurvivalEstimator(), random.Random(5)
    for index in range(800):
        confidence = rng.choice((0.9, 0.3))
        is_accepted = confidence < 0.5 or rng.random() < 0.5
        estimator.observe(
            str(index), "d", num_draft_tokens=1, num_accepted_tokens=int(is_accepted), confidences=(confidence,)
        )
    low, high = (estimator.survivals("r", "d", 1, (confidence,))[0] for confidence in (0.3, 0.9))
    assert low > 0.93
    assert high == pytest.approx(0.5, abs=0.1)


def test_an_unheard_of_confidence_is_believed_at_first():
    estimator = SurvivalEstimator()
    assert [estimator.survivals("r", "d", 1, (c,))[0] for c in (0.25, 0.5, 0.75)] == pytest.approx(
        [0.25, 0.5, 0.75], abs=0.04
    )
    assert estimator.survivals("r", "d", 1, (1.0,))[0] > 0.95
    assert estimator.survivals("r", "d", 1, (0.0,))[0] < 0.07


def test_a_drafter_that_is_too_modest_throughout_is_soon_known_for_it():
    """What it claimed at 0.1 and 0.3 came true two times in three: then its 0.2 is worth more than it says."""
    estimator = SurvivalEstimator()
    for index in range(30):
        estimator.observe(
            str(index),
            "d",
            num_draft_tokens=1,
            num_accepted_tokens=int(index % 3 > 0),
            confidences=((0.1, 0.3)[index % 2],),
        )
    assert 0.4 < estimator.survivals("r", "d", 1, (0.2,))[0] < 0.7
    assert estimator.survivals("r", "other", 1, (0.2,))[0] < 0.25


def test_confidences_hold_as_far_as_they_reach_and_history_beyond():
    estimator = SurvivalEstimator()
    survivals = estimator.survivals("r", "d", 3, (0.5, 0.25))
    assert survivals[:2] == pytest.approx([0.5, 0.125], abs=0.03)
    assert survivals[2] == pytest.approx(survivals[1] * (1 - INITIAL_HAZARD))
    assert estimator.survivals("r", "d", 1, (0.5, 0.25)) == survivals[:1]


def test_what_was_never_reached_is_not_judged():
    """A draft rejected at once says nothing of its later positions."""
    estimator = SurvivalEstimator()
    for index in range(300):
        estimator.observe(f"{index} a", "d", num_draft_tokens=4, num_accepted_tokens=0)
        estimator.observe(f"{index} b", "d", num_draft_tokens=4, num_accepted_tokens=4)
    survivals = estimator.survivals("newcomer", "d", 4)
    assert survivals[0] == pytest.approx(0.5, abs=0.03)
    assert survivals[3] > 0.9 * survivals[0]


def stretches(estimator: SurvivalEstimator, request_ids: Sequence[str], *, num_rounds: int = 400) -> None:
    """Let the first token of a draft be what it was in the round before, nine times out of ten."""
    rng = random.Random(8)
    for request_id in request_ids:
        num_accepted = 0
        for _ in range(num_rounds):
            num_accepted = num_accepted if rng.random() < 0.9 else 1 - num_accepted
            estimator.observe(request_id, "d", num_draft_tokens=1, num_accepted_tokens=num_accepted)


def test_a_round_is_judged_by_how_the_last_one_went():
    estimator = SurvivalEstimator()
    stretches(estimator, "abcd")
    found = []
    for num_accepted in (0, 1):
        estimator.observe("new", "d", num_draft_tokens=1, num_accepted_tokens=num_accepted)
        found.append(estimator.survivals("new", "d", 1)[0])
    assert found == pytest.approx([0.1, 0.9], abs=0.08)


def test_a_drafter_is_judged_by_its_own_last_round():
    estimator = SurvivalEstimator()
    stretches(estimator, "ab")
    undrafted = estimator.survivals("new", "d", 1)
    estimator.observe("new", "other", num_draft_tokens=1, num_accepted_tokens=1)
    own = estimator.survivals("new", "d", 1)[0]
    assert own == pytest.approx(undrafted[0], abs=0.08), "but for the request's frailty"


def test_without_drafts_a_request_becomes_what_its_pool_is():
    estimator, rng = SurvivalEstimator(), random.Random(9)
    for index in range(300):
        play(estimator, rng, (0.7,), request_id=str(index), num_rounds=2)
    play(estimator, rng, (0.0,), request_id="rambles", num_rounds=30)
    found = [estimator.survivals("rambles", "d", 1)[0]]
    for num_rounds in (20, 200):
        for _ in range(num_rounds):
            estimator.observe_plain("rambles")
        found.append(estimator.survivals("rambles", "d", 1)[0])
    assert found[0] < found[1] < found[2] == pytest.approx(estimator.survivals("newcomer", "d", 1)[0], abs=0.02)
    estimator.observe_plain("never here")
    assert "never here" not in estimator.table.request_ids


@pytest.mark.parametrize("confidences", [None, (1.0, 0.0, 0.97, 0.5)])
def test_survivals_never_rise(confidences):
    estimator, rng = SurvivalEstimator(), random.Random(6)
    play(estimator, rng, (0.2, 0.99, 0.5))
    survivals = estimator.survivals("r", "d", 8, confidences)
    assert survivals == sorted(survivals, reverse=True)
    assert all(0.0 < survival < 1.0 for survival in survivals)


def test_drafts_of_a_step_count_as_if_they_had_been_verified_one_after_another():
    """Pools forget by the token: of drafts that are verified together, each is as old as the others."""
    at_once, in_turn, rng = SurvivalEstimator(), SurvivalEstimator(), random.Random(10)
    names = [str(index) for index in range(16)]
    for _ in range(60):
        accepted = [next((i for i in range(4) if rng.random() >= 0.7), 4) for _ in names]
        for name, num_accepted in zip(names, accepted, strict=True):
            in_turn.observe(name, "d", num_draft_tokens=4, num_accepted_tokens=num_accepted)
        num_accepted = np.array(accepted)
        num_judged = np.minimum(num_accepted + 1, 4)
        rows, drafter = at_once.table.rows(names), at_once.all.number_of("d")
        after = at_once.all.end_rounds(rows, drafter, num_judged, num_accepted)
        at_once.all.observe(rows, drafter, num_judged, num_accepted, after)
    for name in ("newcomer", *names):
        assert at_once.survivals(name, "d", 4) == pytest.approx(in_turn.survivals(name, "d", 4), rel=0.03)
    assert at_once.all.num_judged == pytest.approx(in_turn.all.num_judged)


def test_memory_is_bounded():
    estimator, rng = SurvivalEstimator(), random.Random(7)
    play(estimator, rng, (0.05,), drafter_id="bad")
    estimator.table.forget("r")
    estimator.table.forget("never here")
    assert estimator.table.request_ids == set()
    for index in range(MAX_POOLS):
        play(estimator, rng, (0.9,), drafter_id=str(index), num_rounds=20)
    assert estimator.survivals("x", "bad", 1) == pytest.approx(estimator.survivals("x", "unheard of", 1))


def test_usual_survivals_are_those_after_any_outcome():
    estimator, rng = SurvivalEstimator(), random.Random(8)
    assert estimator.survivals("r", "d", 2, are_usual=True) == estimator.survivals("r", "d", 2)
    accepted = True
    for _ in range(2000):  # right after a draft that was right, wrong after a wrong one
        accepted = rng.random() < (0.9 if accepted else 0.1)
        estimator.observe("r", "d", num_draft_tokens=1, num_accepted_tokens=int(accepted))
    usual = []
    for num_accepted, after in ((1, 0.9), (0, 0.1)):
        estimator.end_round("newcomer", "d", 1, num_accepted)
        assert estimator.survivals("newcomer", "d", 1) == pytest.approx([after], abs=0.05)
        usual.append(estimator.survivals("newcomer", "d", 1, are_usual=True))
    assert usual[0] == usual[1] == pytest.approx([0.5], abs=0.05)


@pytest.mark.parametrize("lengths", [(2, 1, 3), (1, 3, 2), (0, 2, 1), (2, 2, 2), (3,), (0, 0)])
def test_the_bins_of_rows_are_those_of_each_row_alone(lengths: Sequence[int]):
    """Lengths that sum to as much as equal ones would: a later confidence may not move to another place."""
    rng = random.Random(7)
    rows = [[rng.random() for _ in range(length)] for length in lengths]
    together = bins_of_rows(rows, 3)
    assert together.tolist() == [bins_of_rows([row], 3)[0].tolist() for row in rows]
