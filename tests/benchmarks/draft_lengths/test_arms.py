"""The policies of the replay: lengths by hand, and who may know what."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.draft_lengths.arms import (
    BestSlots,
    FixedLength,
    clairvoyant,
    fit_survivals,
    oracle,
)
from benchmarks.draft_lengths.replay import MAX_LENGTH, Batch, Drafts, StepOutcome, Workload, replay_policy
from outrider.lab.replay.machine import EAGLE, FloatArray, MachineFit
from outrider.lab.replay.traces import NGRAM, Trace

# 1 s a step and 0.1 s a token; drafts are free
PLAIN = MachineFit(
    fixed_s=1.0,
    token_s=0.1,
    context_token_s=0.0,
    overhead_s=0.0,
    eagle_fixed_s=0.0,
    eagle_token_s=0.0,
    eagle_context_token_s=0.0,
    ngram_share=0.0,
)


def batch(offered: list[list[int]]) -> Batch:
    size = len(offered[0])
    return Batch(
        request_ids=[f"r{lane}" for lane in range(size)],
        requests=np.arange(size),
        cells=np.arange(size),
        offered=np.array(offered),
        ngram_kinds=np.zeros((size, MAX_LENGTH), int),
        num_context_tokens=0,
    )


def outcome(accepted: list[int], finished: list[bool] | None = None) -> StepOutcome:
    is_finished = np.array(finished or [False] * len(accepted))
    return StepOutcome(accepted=np.array(accepted), is_finished=is_finished, step_s=1.0, draft_s=0.0)


def given(*rows: list[float]) -> FloatArray:
    """Survivals of one drafter, the rest of each row 0."""
    return np.array([[row + [0.0] * (MAX_LENGTH - len(row)) for row in rows]])


def best(survivals: FloatArray, machine: MachineFit, *offered: int) -> list[int]:
    names = (EAGLE,) if len(survivals) == 1 else (NGRAM, EAGLE)
    given_offers = [list(offered)] if len(survivals) == 1 else [list(offered), [MAX_LENGTH] * len(offered)]
    drafts = BestSlots(lambda _: survivals, names, machine).plan(batch(given_offers))
    return [*drafts.lengths.tolist(), *drafts.drafters.tolist()]


def test_of_two_drafters_each_request_uses_the_one_that_did_better_for_it() -> None:
    policy, both = FixedLength(4, 2, 2), [[8, 8], [8, 8]]
    for drafters, accepted in [([0, 0], [4, 0]), ([1, 1], [0, 4])]:
        drafts = Drafts(drafters=np.array(drafters), lengths=np.array([4, 4]))
        policy.observe(batch(both), drafts, outcome(accepted))
    assert policy.plan(batch(both)).drafters.tolist() == [0, 1]
    assert policy.plan(batch([[0, 8], [8, 8]])).drafters.tolist() == [1, 1]  # the first has no draft for this one
    policy.observe(batch(both), policy.plan(batch(both)), outcome([4, 4], [False, True]))
    # a request in the place of one that ended begins anew
    policy.observe(batch(both), Drafts(drafters=np.zeros(2, int), lengths=np.full(2, 4)), outcome([4, 4]))
    assert policy.plan(batch(both)).drafters.tolist() == [0, 0]


def test_the_best_slots_are_those_with_the_most_tokens_per_second() -> None:
    # rates of 0, 1, 2 … slots: 1/1.1 = 0.909, 1.9/1.2 = 1.583, 2.4/1.3 = 1.846, 2.45/1.4 = 1.75
    assert best(given([0.9, 0.5, 0.05]), PLAIN, 8) == [2, 0]
    # the price is about 0.2: the second request's only slot pays, its next does not
    assert best(given([0.9, 0.5, 0.05], [0.4, 0.1]), PLAIN, 8, 8) == [2, 1, 0, 0]
    assert best(given([0.9, 0.5, 0.05], [0.4, 0.1]), PLAIN, 1, 0) == [1, 0, 0, 0]
    assert best(given([0.05]), PLAIN, 8) == [0, 0]
    # by 0.9 of a token a draft does not pay for a whole second more, by 0.9 and 0.9 it does
    waiting = MachineFit(fixed_s=1.0, token_s=0.01, context_token_s=0.0, overhead_s=0.0, eagle_fixed_s=1.0)
    assert best(given([0.9]), waiting, 8) == [0, 0]
    assert best(given([0.95, 0.9]), waiting, 8) == [2, 0]


def test_a_knee_between_the_slots_is_seen() -> None:
    kneed = MachineFit(
        fixed_s=1.0, token_s=0.0, context_token_s=0.0, overhead_s=0.0, eagle_fixed_s=0.0, flop_per_byte=3.0
    )
    assert kneed.knee == 3.0
    assert best(given([0.5, 0.4, 0.3, 0.2]), kneed, 8) == [2, 0]  # free up to 3 tokens, then a third of a step each


def test_a_hybrid_pays_for_the_dear_drafter_only_where_it_gains_more() -> None:
    survivals = np.concatenate([given([0.6], [0.0]), given([0.8, 0.7], [0.8, 0.7])])
    free = MachineFit(fixed_s=1.0, token_s=0.01, context_token_s=0.0, overhead_s=0.0, eagle_fixed_s=0.0)
    assert best(survivals, free, 8, 0) == [2, 2, 1, 1]
    dear = MachineFit(fixed_s=1.0, token_s=0.01, context_token_s=0.0, overhead_s=0.0, eagle_fixed_s=5.0)
    assert best(survivals, dear, 8, 0) == [1, 0, 0, 0]


def work(*lengths: list[int], name: str = EAGLE) -> Workload:
    traces = [
        Trace(prompt_ids=[1], generated_ids=list(range(1000, 1000 + len(row))), recorded={name: row}) for row in lengths
    ]
    return Workload.from_traces(traces, (name,))


def test_survivals_are_counted_where_drafts_begin() -> None:
    # of the first run drafts of 1 take one: they begin at 0, 2, 3, 4; drafts of 2 at 0, 3, 4; longer ones at 0, 4
    fitted = fit_survivals(work([4, 1, 1, 1, 1]))
    tried = [4 + 3 + 2 * 6, 3 + 2 * 6, 2 * 6]
    right = [1 + 1 + 6, 1 + 6, 6]
    pool = [(yes + 1) / (all_ + 2) for yes, all_ in zip(right, tried, strict=True)]
    shares = [(yes + 8 * prior) / (all_ + 8) for yes, prior, all_ in zip(right, pool, tried, strict=True)]
    assert shares[1] > shares[0]  # more of the longer drafts begin at 0
    assert fitted[0, 0, :3].tolist() == pytest.approx([shares[0], shares[0], min(shares[0], shares[2])])
    assert fitted[0, 0, 3] < 0.1


@pytest.mark.parametrize("batch_size", [1, 48])
def test_to_know_more_is_never_worse(batch_size: int) -> None:
    rng = np.random.default_rng(3)
    rows = [np.minimum(rng.geometric(1 - rate, 40), 9).tolist() for rate in rng.uniform(0.5, 0.7, 12)]
    workload, machine = work(*rows), MachineFit()

    def throughput(policy: FixedLength | BestSlots) -> float:
        return replay_policy(workload, policy, machine, batch_size=batch_size, num_tokens=3000).throughput

    fixed = max(throughput(FixedLength(length, 1, batch_size)) for length in range(0, 9, 4))
    probable, bound = throughput(oracle(workload, machine)), throughput(clairvoyant(workload, machine))
    assert 0.99 * fixed < probable < bound
