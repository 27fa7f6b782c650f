from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.verifier_service.batch import ScheduledBatch
from outrider.verifier_service.scheduler import Schedule
from outrider.verifier_service.step_stats import StepStats

EMPTY = ScheduledBatch(
    token_ids=[],
    positions=[],
    slot_mapping=[],
    query_lengths=[],
    context_lengths=[],
    block_tables=[],
    logits_indices=[],
)


def schedule_of(num_tokens: int) -> Schedule:
    return Schedule(items=(), preempted=(), batch=replace(EMPTY, token_ids=[0] * num_tokens))


def test_counters_add_up():
    stats = StepStats()
    for num_tokens, num_committed, seconds in ((10, 1, 0.5), (4, 3, 0.25), (1, 0, 0.125)):
        stats.observe(schedule_of(num_tokens), num_committed=num_committed, seconds=seconds)
    assert (stats.num_steps, stats.num_scheduled_tokens, stats.num_committed_tokens) == (3, 15, 4)
    assert stats.busy_s == pytest.approx(0.875)
