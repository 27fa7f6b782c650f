"""The engine's estimates in the replay: they learn from the past alone and come close to who knows better."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.draft_lengths.adaptive import Adaptive
from benchmarks.draft_lengths.arms import FixedLength, oracle
from benchmarks.draft_lengths.replay import MAX_LENGTH, Batch, Drafts, Policy, StepOutcome, Workload, replay_policy
from outrider.lab.replay.machine import EAGLE, IntArray, MachineFit
from outrider.lab.replay.traces import NGRAM, Trace


def batch(size: int, drafters: int = 1) -> Batch:
    return Batch(
        request_ids=[f"r{lane}" for lane in range(size)],
        requests=np.zeros(size, int),
        cells=np.zeros(size, int),
        offered=np.full((drafters, size), MAX_LENGTH),
        ngram_kinds=np.ones((size, MAX_LENGTH), int),
        num_context_tokens=200 * size,
    )


def step(policy: Adaptive, running: Batch, accepts: list[int], machine: MachineFit, eagle: int = 0) -> Drafts:
    """Play a step in which each drafter's drafts are right as far as `accepts` says."""
    return step_of_each(policy, running, np.array(accepts)[:, np.newaxis], machine, eagle)


def step_of_each(policy: Adaptive, running: Batch, accepts: IntArray, machine: MachineFit, eagle: int = -1) -> Drafts:
    """The same with what each drafter, or any, gets right of each request: [num_drafters or 1, batch_size or 1]."""
    drafts = policy.plan(running)
    rights = np.broadcast_to(accepts, (len(running.offered), running.size))
    accepted = np.minimum(drafts.lengths, rights[drafts.drafters, np.arange(running.size)])
    forward_s = machine.forward_s(np.array([running.size + drafts.lengths.sum()]), running.num_context_tokens)
    asked = drafts.lengths if drafts.asked is None else drafts.asked
    num_eagle = asked[drafts.drafters == eagle].sum(keepdims=True)
    draft_s = machine.draft_s(forward_s, num_eagle, asked.sum(keepdims=True) - num_eagle, 0)
    outcome = StepOutcome(
        accepted=accepted,
        is_finished=np.zeros(running.size, dtype=np.bool_),
        step_s=float(forward_s[0]) + machine.overhead_s,
        draft_s=float(draft_s[0]),
    )
    policy.observe(running, drafts, outcome)
    return drafts


def test_what_is_recorded_at_the_cells_is_not_looked_at() -> None:
    machine, running = MachineFit(), batch(3)
    policy, other = Adaptive((EAGLE,), machine), Adaptive((EAGLE,), machine)
    for number in range(20):
        first = step(policy, running, [3], machine)
        second = step(other, replace(running, cells=np.full(3, number), requests=np.full(3, number)), [3], machine)
        assert first.lengths.tolist() == second.lengths.tolist()


def test_copies_are_judged_by_what_became_of_their_kind() -> None:
    """Half of the requests have copies of a kind that is always right, by turns; their history says one in two."""
    machine, accepts = MachineFit(ngram_share=0.0), [0, 8]
    policy, running = Adaptive((NGRAM,), machine), batch(128)
    lanes = np.arange(running.size)
    for number in range(60):
        is_right = (lanes + number) % 2
        kinds = np.repeat(1 + is_right, MAX_LENGTH).reshape(running.size, MAX_LENGTH)
        drafts = step_of_each(policy, replace(running, ngram_kinds=kinds), np.array(accepts)[is_right], machine)
    assert drafts.lengths[is_right == 1].mean() > 10 * drafts.lengths[is_right == 0].mean()


def test_a_request_that_has_ended_is_forgotten() -> None:
    machine, running = MachineFit(), batch(2)
    policy = Adaptive((EAGLE,), machine)
    drafts = policy.plan(running)
    ended = StepOutcome(accepted=np.zeros(2, int), is_finished=np.array([True, False]), step_s=0.01, draft_s=0.0)
    policy.observe(running, drafts, ended)
    others = policy.plan(replace(running, request_ids=["new", "r1"]))
    assert policy.request_ids == {"new", "r1"}
    assert others.lengths.min() > 0


@pytest.mark.parametrize("batch_size", [4, 100])
def test_adaptive_comes_close_to_the_oracle_and_to_the_best_fixed_length(batch_size: int) -> None:
    rng, machine = np.random.default_rng(5), MachineFit()
    rows = [np.minimum(rng.geometric(1 - rate, 80), 9).tolist() for rate in rng.uniform(0.4, 0.8, 20)]
    traces = [Trace(prompt_ids=[1] * 99, generated_ids=[2] * 80, recorded={EAGLE: row}) for row in rows]
    work = Workload.from_traces(traces, (EAGLE,))

    def throughput(policy: Policy) -> float:
        num_tokens = 80 * batch_size
        return replay_policy(
            work, policy, machine, batch_size=batch_size, num_tokens=num_tokens, num_warmup_tokens=2 * num_tokens
        ).throughput

    fixed = max(throughput(FixedLength(length, 1, batch_size)) for length in (0, 1, 2, 3, 5, 8))
    reached = throughput(Adaptive((EAGLE,), machine))
    assert reached > 0.9 * throughput(oracle(work, machine))
    assert reached > 0.92 * fixed
