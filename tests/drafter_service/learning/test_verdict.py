"""Who wins a trial, who loses, and how often noise decides."""

import random

import pytest

from outrider.drafter_service.engine.learning_messages import TrialCounts
from outrider.drafter_service.learning.verdict import MAX_TRIAL_ROUNDS, Score, Trial, Verdict, verdict


def counts_of(pairs, serving="v0", shadow="v1"):
    """Counts of rounds in which the serving version and the shadow scored so much."""
    return TrialCounts(
        serving=serving,
        shadow=shadow,
        num_rounds=len(pairs),
        serving_score=sum(served for served, _ in pairs),
        shadow_score=sum(shadowed for _, shadowed in pairs),
        squared_difference=sum((shadowed - served) ** 2 for served, shadowed in pairs),
    )


def score_of(pairs, candidate="v1"):
    return Score.of(counts_of(pairs), candidate)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], Verdict.OPEN),
        ([(2, 2)] * 2000, Verdict.OPEN),
        ([(2, 2)] * 4096, Verdict.DRAW),
        ([(0, 0)] * 4096, Verdict.DRAW),
        ([(2, 0)] * 15, Verdict.OPEN),
        ([(2, 0)] * 16, Verdict.LOSES),
        ([(0, 1)] * 63, Verdict.OPEN),
        ([(0, 1)] * 64, Verdict.WINS),
        ([(2, 1), (2, 4)] * 32, Verdict.OPEN),  # 0.5 more, with a spread of 1.5: 2.6 standard errors
        ([(2, 1), (2, 4)] * 50, Verdict.WINS),
        ([(4, 1), (1, 2)] * 40, Verdict.LOSES),
        ([(100, 100.5)] * 64, Verdict.OPEN),  # always better, and not worth it
        ([(100, 101)] * 64, Verdict.WINS),
    ],
)
def test_verdicts(pairs, expected):
    assert verdict(score_of(pairs), MAX_TRIAL_ROUNDS) is expected


def test_the_standard_error_by_hand():
    score = score_of([(1, 2), (1, 4), (1, 0)])
    assert (score.candidate, score.predecessor) == (2.0, 1.0)
    assert score.standard_error == pytest.approx((4 / 3) ** 0.5)  # of 1, 3, -1: variance 4
    assert score.sigmas == pytest.approx(1 / (4 / 3) ** 0.5)


def test_a_version_that_serves_is_judged_by_the_same_counts_the_other_way_round():
    pairs = [(0, 2)] * 16
    assert verdict(score_of(pairs, candidate="v0"), 1024) is Verdict.LOSES
    assert str(score_of(pairs, candidate="v0")) == "0.00 against 2.00 a round, over 16 rounds"


def trial(candidate="v1", max_rounds=MAX_TRIAL_ROUNDS):
    return Trial(serving="v0", shadow="v1", candidate=candidate, max_rounds=max_rounds)


def test_counts_of_all_drafters_are_added_also_of_those_that_restarted():
    made = trial()
    made.take("a", counts_of([(1, 2)] * 5))
    made.take("b", counts_of([(1, 2)] * 3))
    made.take("a", counts_of([(1, 2)] * 8))  # cumulative
    made.take("a", counts_of([(1, 2)] * 2))  # restarted
    made.take("c", counts_of([(1, 2)] * 100, serving="v7"))
    made.take("c", counts_of([(1, 2)] * 100, shadow="v7"))
    assert made.score().num_rounds == 8 + 2 + 3
    assert made.score().candidate == 2.0


def test_a_shadow_that_names_nothing_loses_within_sixteen_rounds():
    made, verdicts = trial(), []
    for num_rounds in range(1, 17):
        made.take("a", counts_of([(2, 0)] * num_rounds))
        verdicts.append(made.look()[0])
    assert verdicts == [Verdict.OPEN] * 15 + [Verdict.LOSES]


def test_looks_are_few():
    made, looks = trial(), []
    for num_rounds in range(1, 4097):
        before = made._next_look
        made.take("a", counts_of([(2, 2)] * num_rounds))
        made.look()
        if made._next_look != before:
            looks.append(num_rounds)
    assert looks == [16, 32, 64, 128, 256, 512, 1024, 2048, 4096]


def play(seed, gain=0.0, max_rounds=MAX_TRIAL_ROUNDS):
    """Play a trial of two versions whose drafts are random; return how it ends and after how many rounds."""
    rng, made = random.Random(seed), trial(max_rounds=max_rounds)
    total = [0.0, 0.0, 0.0]
    for num_rounds in range(1, max_rounds + 1):
        served, shadowed = (min(4, int(rng.expovariate(0.5))) for _ in range(2))
        shadowed += rng.random() < gain
        for index, value in enumerate((served, shadowed, (shadowed - served) ** 2)):
            total[index] += value
        if num_rounds & 15:
            continue
        counts = TrialCounts(
            serving="v0",
            shadow="v1",
            num_rounds=num_rounds,
            serving_score=total[0],
            shadow_score=total[1],
            squared_difference=total[2],
        )
        made.take("a", counts)
        if (outcome := made.look()[0]) is not Verdict.OPEN:
            return outcome, num_rounds
    raise AssertionError("no end")


def test_equal_versions_are_published_in_less_than_one_of_a_hundred_trials():
    outcomes = [play(seed, max_rounds=1024)[0] for seed in range(400)]
    assert outcomes.count(Verdict.WINS) < 4
    assert outcomes.count(Verdict.LOSES) < 8
    assert outcomes.count(Verdict.DRAW) > 385


def test_a_gain_of_a_third_of_a_token_is_found():
    outcomes = [play(seed, gain=0.33) for seed in range(40)]
    assert all(outcome is Verdict.WINS for outcome, _ in outcomes)
    assert sum(num_rounds for _, num_rounds in outcomes) / 40 < 800
