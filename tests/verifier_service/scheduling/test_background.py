"""Background requests: they run while there are no others, give way at once, and leave their blocks in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fakes.engine_bench import EngineBench, Pace, make_request, tokens_of
from outrider.verifier_service.engine.loop import engine_load
from outrider.verifier_service.engine.step_stats import RecentRates
from outrider.verifier_service.messages.request import GenerationRequest, Request, SamplingParams
from outrider.verifier_service.scheduling.scheduler import BACKGROUND_TOKENS, Scheduler
from support import parts

BLOCK_SIZE = 4
LONG = tuple(range(40))


def added(scheduler: Scheduler, name: str, prompt: Sequence[int], **fields: Any) -> Request:
    request = parts.request(name, prompt, **fields)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, now_s: float = 0.0) -> dict[str, int]:
    """Run a step, in which every request that samples gets token 7; return the requests' shares in tokens."""
    schedule = scheduler.schedule(now_s)
    assert schedule is not None
    shares = {item.request.request_id: item.num_new_tokens for item in schedule.items}
    for item in schedule.items:
        parts.commit(scheduler, item, [7] if item.samples else [])
    scheduler.check_integrity()
    return shares


def test_a_background_request_runs_alone_in_small_steps():
    scheduler = parts.scheduler(num_blocks=64, max_model_len=256)
    added(scheduler, "b", [*range(90)] * 2, max_tokens=1, is_background=True)
    assert step(scheduler) == {"b": BACKGROUND_TOKENS}
    assert scheduler._config.max_num_batched_tokens > BACKGROUND_TOKENS


def test_an_arrival_takes_the_next_step_and_all_blocks():
    scheduler = parts.scheduler(num_blocks=24, max_num_batched_tokens=16, max_model_len=96)
    added(scheduler, "b", LONG, max_tokens=1, is_background=True)
    step(scheduler)
    added(scheduler, "a", [99] * 90, max_tokens=2)  # needs all blocks but one
    assert step(scheduler) == {"a": 16}
    assert [request.request_id for request in scheduler.running] == ["a"]
    assert (scheduler.num_waiting, scheduler.waiting) == (0, ())
    assert [request.request_id for request in scheduler.background] == ["b"]
    assert scheduler.num_preemptions == 0


def test_it_goes_on_from_its_own_blocks_once_the_others_are_gone():
    scheduler = parts.scheduler(max_num_batched_tokens=16)
    background = added(scheduler, "b", LONG, max_tokens=1, is_background=True)
    step(scheduler)
    added(scheduler, "a", [99, 98], max_tokens=2)
    step(scheduler)
    assert not background.block_table
    scheduler.remove("a")
    assert step(scheduler) == {"b": 16}
    assert background.num_computed_tokens == 32


def test_a_later_request_finds_its_blocks():
    scheduler = parts.scheduler()
    added(scheduler, "b", LONG, max_tokens=1, is_background=True)
    while scheduler.has_work() and scheduler._requests["b"].num_output_tokens == 0:
        step(scheduler)
    scheduler.remove("b")
    assert scheduler.num_prefix_queried_tokens == 0
    later = added(scheduler, "a", [*LONG, 50, 51], max_tokens=2)
    other = added(scheduler, "c", [*LONG, 50, 51], max_tokens=2, cache_salt="other")
    step(scheduler)
    assert later.num_cached_tokens == len(LONG) // BLOCK_SIZE * BLOCK_SIZE
    assert other.num_cached_tokens == 0


@pytest.mark.parametrize("order", [("b", "a"), ("a", "b")])
def test_it_waits_while_a_request_is_held_for_its_draft(order):
    scheduler = parts.scheduler()
    for name in order:
        added(scheduler, name, [1, 2, 3] if name == "a" else LONG, max_tokens=4, is_background=name == "b")
    step(scheduler)
    scheduler.running[0].hold_until_s = 5.0
    assert scheduler.schedule(1.0) is None
    scheduler.remove("a")
    assert step(scheduler, now_s=1.0) == {"b": len(LONG)}


def background(name: str, prompt: tuple[int, ...]) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, num_speculative_tokens=0)
    return GenerationRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, is_background=True)


@pytest.mark.parametrize("pace", Pace)
def test_no_token_of_others_changes_and_they_take_no_step_more(pace: Pace):
    """Sampled, seeded and greedy requests, which draw from one generator; background requests come in between."""

    def run(num_background: int) -> tuple[dict[str, tuple[int, ...]], int]:
        class Bench(EngineBench):
            pass

        Bench.pace = pace
        bench = Bench(num_blocks=64, block_size=4, max_num_batched_tokens=32)
        outputs: dict[str, tuple[int, ...]] = {}
        num_steps = 0
        for name, options in (("a", {}), ("s", {"temperature": 1.0}), ("t", {"temperature": 1.0, "seed": 3})):
            for index in range(num_background):
                bench.engine.add(background(f"{name} ahead {index}", LONG))
                bench.step()
            bench.engine.add(make_request(name, prompt=(5, 9, 2), max_tokens=8, **options))
            while name in bench.engine.requests:
                num_steps += 1
                for output in bench.step() or []:
                    outputs[output.request_id] = outputs.get(output.request_id, ()) + output.token_ids
                bench.engine.check_integrity()
        bench.finish()
        return {name: outputs[name] for name in ("a", "s", "t")}, num_steps

    plain, num_steps = run(0)
    beside, num_beside = run(2)
    assert beside == plain
    assert num_beside <= num_steps + 3 * (pace is not Pace.AT_ONCE)  # pipelined: one step was in flight


def test_it_is_no_load():
    bench = EngineBench(num_blocks=64, block_size=4)
    bench.engine.add(background("b", LONG))
    bench.engine.add(background("c", LONG))
    assert engine_load(bench.engine, RecentRates(), 0.0).num_waiting == 0
    bench.step()
    load = engine_load(bench.engine, RecentRates(), 0.0)
    assert (load.num_running, load.num_waiting, load.requests) == (0, 0, ())
    assert {len(tokens_of(outputs)) for outputs in bench.finish().values()} <= {1}
