"""Batches over recorded acceptance: what is committed, what a step costs, who comes next."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.draft_lengths.replay import MAX_LENGTH, Batch, Drafts, StepOutcome, Workload, replay_policy
from outrider.lab.replay.machine import EAGLE, MachineFit
from outrider.lab.replay.traces import NGRAM, Trace

FLAT = MachineFit(
    fixed_s=1.0, token_s=0.0, context_token_s=0.0, overhead_s=0.0, eagle_fixed_s=0.5, eagle_token_s=0.0,
    eagle_context_token_s=0.0, ngram_share=0.25,
)  # fmt: skip


def trace(eagle: list[int], ngram: list[int] | None = None, prompt: int = 2) -> Trace:
    """A request of which no three tokens stand twice, so that prompt lookup has no draft."""
    recorded = {EAGLE: eagle, NGRAM: ngram or [1] * len(eagle)}
    return Trace(prompt_ids=list(range(prompt)), generated_ids=list(range(1000, 1000 + len(eagle))), recorded=recorded)


def eagle(*traces: Trace) -> Workload:
    return Workload.from_traces(traces, (EAGLE,))


class Always:
    """Drafts the same lengths every time and remembers what it met."""

    def __init__(self, *lengths: int, drafter: int = 0) -> None:
        self.lengths = np.array(lengths)
        self.drafter = drafter
        self.batches: list[Batch] = []
        self.outcomes: list[StepOutcome] = []

    def plan(self, batch: Batch) -> Drafts:
        self.batches.append(batch)
        return Drafts(drafters=np.full(batch.size, self.drafter), lengths=self.lengths)

    def observe(self, batch: Batch, drafts: Drafts, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def test_a_step_commits_what_was_recorded_up_to_the_draft_and_one_more() -> None:
    policy = Always(2)
    #                                 v        v  v     v
    figures = replay_policy(eagle(trace([4, 1, 9, 1, 3, 1, 2])), policy, FLAT, batch_size=1, num_tokens=1)
    begin = int(policy.batches[0].cells[0])  # anywhere
    assert 0 <= begin < 7
    assert figures.num_steps == 1

    policy = Always(2)
    replay_policy(eagle(trace([4, 1, 9, 1, 3, 1, 2])), policy, FLAT, batch_size=1, num_tokens=40)
    cells = [int(batch.cells[0]) for batch in policy.batches]
    start = cells.index(0)
    assert cells[start : start + 5] == [0, 3, 4, 0, 3]  # 3 of 4, 1, 3 of 3; then the next request
    accepted = [int(outcome.accepted[0]) for outcome in policy.outcomes]
    assert accepted[start : start + 3] == [2, 0, 2]
    finished = [bool(outcome.is_finished[0]) for outcome in policy.outcomes]
    assert finished[start : start + 3] == [False, False, True]
    assert len({batch.request_ids for batch in policy.batches[start : start + 4]}) == 2


def test_what_stands_after_the_end_is_not_committed() -> None:
    figures = replay_policy(eagle(trace([9])), Always(8), FLAT, batch_size=1, num_tokens=10)
    assert (figures.num_tokens, figures.num_steps, figures.seconds) == (10, 10, 10 * 1.5)
    assert (figures.throughput, figures.mean_draft_length) == (1 / 1.5, 8.0)


def test_every_policy_meets_the_same_queue() -> None:
    work = eagle(*(trace([1] * length) for length in (2, 3, 4, 5, 6)))

    def queue(policy: Always) -> list[int]:
        replay_policy(work, policy, FLAT, batch_size=1, num_tokens=60)
        named = {batch.request_ids[0]: int(batch.requests[0]) for batch in policy.batches}
        return list(named.values())

    assert queue(Always(0)) == queue(Always(3))
    assert sorted(queue(Always(0))[:5]) == [0, 1, 2, 3, 4]  # all of them before one comes again


def test_the_warm_up_is_played_and_not_counted() -> None:
    policy = Always(0)
    figures = replay_policy(eagle(trace([1] * 10)), policy, FLAT, batch_size=1, num_tokens=5, num_warmup_tokens=7)
    assert (figures.num_tokens, figures.num_verifications, len(policy.batches)) == (5, 5, 12)


def test_seconds_are_the_forward_pass_the_overhead_and_the_drafts() -> None:
    machine = MachineFit()
    work = eagle(trace([1, 1], prompt=100))
    policy = Always(3)
    figures = replay_policy(work, policy, machine, batch_size=1, num_tokens=1)
    context = policy.batches[0].num_context_tokens
    step_s = 5.886e-3 + 4 * 2.101e-5 + context * 3.926e-8 + 1.207e-3
    draft_s = 2.135e-3 + 3 * 8.41e-7 + context * 2.378e-9
    assert policy.outcomes[0].step_s == pytest.approx(step_s)
    assert policy.outcomes[0].draft_s == pytest.approx(draft_s)
    assert figures.seconds == pytest.approx(step_s + draft_s)


def test_beyond_the_knee_time_is_proportional_to_the_tokens() -> None:
    machine = MachineFit()
    assert machine.knee == 300.0
    times_s = machine.forward_s(np.array([0.0, 150.0, 300.0, 600.0, 1200.0]), 1000.0) - 1000 * 3.926e-8
    at_knee_s = 5.886e-3 + 300 * 2.101e-5
    assert times_s == pytest.approx([5.886e-3, 5.886e-3 + 150 * 2.101e-5, at_knee_s, 2 * at_knee_s, 4 * at_knee_s])
    assert MachineFit(flop_per_byte=100.0, weight_bytes=1.0).knee == 50.0


def test_requests_lie_end_to_end_and_a_hybrid_plays_what_all_drafters_have() -> None:
    first, second = trace([3, 2, 1, 12], [1, 1, 1]), trace([2, 1], [5, 1, 1], prompt=4)
    work = Workload.from_traces([first, trace([]), second], (NGRAM, EAGLE))
    assert work.lengths.tolist() == [3, 2]
    assert work.begins.tolist() == [0, 3]
    assert work.prompt_lengths.tolist() == [2, 4]
    assert work.accepted.tolist() == [[0, 0, 0, 4, 0], [2, 1, 0, 1, 0]]
    assert eagle(first).accepted.tolist() == [[2, 1, 0, MAX_LENGTH]]
    with pytest.raises(ValueError, match="no request has recorded lengths of medusa"):
        Workload.from_traces([first], ("medusa",))
