from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.verifier_service.engine.step_stats import NUM_RATE_SAMPLES, RecentRates, StepStats
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.request import GenerationRequest, Request, RequestOutput
from outrider.verifier_service.scheduling.schedule import Schedule, ScheduledRequest

EMPTY = ScheduledBatch(
    token_ids=[],
    positions=[],
    slot_mapping=[],
    query_lengths=[],
    context_lengths=[],
    block_tables=[],
    logits_indices=[],
)


def schedule_of(num_tokens: int, *requests: Request) -> Schedule:
    items = tuple(ScheduledRequest(request=request, num_new_tokens=1, draft=None, samples=True) for request in requests)
    return Schedule(items=items, preempted=(), batch=replace(EMPTY, token_ids=[0] * num_tokens))


def committed(
    num_tokens: int, *, num_draft_tokens: int = 0, num_accepted_tokens: int = 0, weight_version: str = "v0"
) -> RequestOutput:
    return RequestOutput(
        weight_version=weight_version,
        request_id="r",
        token_ids=(7,) * num_tokens,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
    )


def test_counters_add_up():
    stats = StepStats()
    outputs = [
        [committed(1)],
        [committed(3, num_draft_tokens=4, num_accepted_tokens=2), committed(1, num_draft_tokens=2)],
        [],
    ]
    for num_tokens, step, seconds in zip((10, 4, 1), outputs, (0.5, 0.25, 0.125), strict=True):
        stats.observe(schedule_of(num_tokens), step, began_s=1.0, ended_s=1.0 + seconds)
    assert (stats.num_steps, stats.num_scheduled_tokens, stats.num_committed_tokens) == (3, 15, 5)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 6, 2)
    assert stats.busy_s == pytest.approx(0.875)
    assert sum(stats.step_s.counts().counts) == 3


def test_acceptance_is_counted_by_version_of_the_last_four():
    stats = StepStats()
    for number in (0, 1, 2, 3, 0, 4, 5):
        drafted = committed(3, num_draft_tokens=4, num_accepted_tokens=2, weight_version=f"v{number}")
        plain = committed(1, weight_version="without drafts")
        stats.observe(schedule_of(4), [drafted, drafted, plain], began_s=1.0, ended_s=2.0)
    found = {name: (each.num_draft_tokens, each.num_accepted_tokens) for name, each in stats.by_version.items()}
    assert found == {"v3": (8, 4), "v0": (16, 8), "v4": (8, 4), "v5": (8, 4)}
    assert list(found)[-1] == "v5", "the present one is last"


def test_the_time_in_the_queue_is_counted_once_per_request():
    stats = StepStats()
    request = Request.of(GenerationRequest(request_id="r", prompt_token_ids=(1,)), 10.0)
    stats.observe(schedule_of(1, request), [], began_s=12.5, ended_s=13.0)
    stats.observe(schedule_of(1, request), [], began_s=20.0, ended_s=21.0)
    queue = stats.queue_s.counts()
    assert (sum(queue.counts), queue.total) == (1, 2.5)


def test_rates_are_those_of_the_last_reports():
    stats, rates = StepStats(), RecentRates()
    assert (rates.tokens_per_s, rates.mean_step_s) == (0.0, None)
    stats.observe(schedule_of(1), [committed(100)], began_s=0.0, ended_s=50.0)
    for second in range(2 * NUM_RATE_SAMPLES):
        stats.observe(schedule_of(1), [committed(4)], began_s=second, ended_s=second + 0.25)
        rates.sample(stats, second)
    assert rates.tokens_per_s == pytest.approx(4.0), "what lies before the window does not count"
    assert rates.mean_step_s == pytest.approx(0.25)
    for second in range(100, 100 + NUM_RATE_SAMPLES):
        rates.sample(stats, second)
    assert (rates.tokens_per_s, rates.mean_step_s) == (0.0, None)


def test_the_draft_length_is_that_of_the_windows_asks():
    stats, rates = StepStats(), RecentRates()
    assert rates.draft_length_mean == 0.0
    rates.sample(stats, 10.0, num_asks=100, num_asked_tokens=800)
    assert rates.draft_length_mean == 0.0, "what lies before the window does not count"
    rates.sample(stats, 12.0, num_asks=104, num_asked_tokens=810)
    assert rates.draft_length_mean == 2.5
    for tick in range(NUM_RATE_SAMPLES):
        rates.sample(stats, 13.0 + tick, num_asks=104, num_asked_tokens=810)
    assert rates.draft_length_mean == 0.0, "nobody decoded"


def test_the_idle_share_is_that_of_the_window():
    stats, rates = StepStats(), RecentRates()
    assert rates.idle_share == 0.0
    rates.sample(stats, 10.0)
    stats.idle_s = 0.5
    rates.sample(stats, 12.0)
    assert rates.idle_share == 0.25
    for tick in range(NUM_RATE_SAMPLES):
        rates.sample(stats, 13.0 + tick)
    assert rates.idle_share == 0.0
