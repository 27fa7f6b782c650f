"""The load of an engine, from what vLLM says of its steps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fakes.hosted.engine import Clock
from fakes.hosted.vllm_outputs import iteration_stats, scheduler_stats
from outrider.cluster.vllm_engine.load import MAX_STEP_S, VllmLoad


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def load(clock: Clock) -> VllmLoad:
    return VllmLoad(clock)


def test_an_engine_without_a_step_is_idle(load: VllmLoad):
    found = load.describe([])
    assert (found.num_running, found.num_waiting, found.kv_usage, found.mean_step_s) == (0, 0, 0.0, None)


def test_counters_add_up_and_the_state_is_the_last_one(load: VllmLoad):
    prefixes = SimpleNamespace(queries=30, hits=10)
    drafts = SimpleNamespace(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=5)
    for num_running in (3, 2):
        step = scheduler_stats(
            num_running, 4, kv_cache_usage=0.5, prefix_cache_stats=prefixes, spec_decoding_stats=drafts
        )
        load.record(step, iteration_stats(7, num_prompt_tokens=20, num_preempted=1))
    found = load.describe([])
    assert (found.num_running, found.num_decoding, found.num_waiting, found.kv_usage) == (2, 2, 4, 0.5)
    counters = found.counters
    assert (counters.num_committed_tokens, counters.num_scheduled_tokens, counters.num_preemptions) == (14, 54, 2)
    assert (counters.num_drafts, counters.num_draft_tokens, counters.num_accepted_tokens) == (4, 16, 10)
    assert (counters.num_prefix_queried_tokens, counters.num_prefix_hit_tokens) == (60, 20)


def test_outputs_without_a_step_are_counted_and_are_none(load: VllmLoad):
    load.record(None, iteration_stats(7))
    found = load.describe([]).counters
    assert (found.num_committed_tokens, found.num_steps) == (7, 0)


def test_a_step_takes_the_time_since_the_last_unless_nothing_ran(load: VllmLoad, clock: Clock):
    load.describe([])
    for later_s, num_running in ((0.0, 1), (0.5, 1), (0.3, 0), (5.0, 1), (MAX_STEP_S, 1), (0.1, 1)):
        clock.now_s += later_s
        load.record(scheduler_stats(num_running), iteration_stats(1))
    found = load.describe([])
    assert found.counters.num_steps == 3
    assert found.mean_step_s == pytest.approx((0.5 + 0.3 + 0.1) / 3)
    assert found.tokens_per_s == pytest.approx(6 / (0.8 + 5.0 + MAX_STEP_S + 0.1))
