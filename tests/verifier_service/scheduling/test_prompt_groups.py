"""The choices of one prompt: who shares what, and that sharing changes no token."""

from __future__ import annotations

import dataclasses

import pytest

from fakes.engine_bench import EngineBench, greedy_tokens, make_request, tokens_of
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.prompt_groups import PromptGroups
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig

PROMPT = (5, 9, 2, 7, 7, 1, 30, 4, 8, 11, 12)  # ten tokens to share: two blocks and a half


def member(name: str, group_id: str | None = "g", num_computed_tokens: int = 0, **fields) -> Request:
    message = dataclasses.replace(make_request(name, prompt=PROMPT), group_id=group_id, **fields)
    request = Request.of(message, 0.0)
    request.num_computed_tokens = num_computed_tokens
    return request


def groups_of(*running: Request) -> PromptGroups:
    groups = PromptGroups()
    for request in running:
        groups.add(request)
        groups.enter(request)
    return groups


def test_the_source_is_the_first_that_has_the_prompt():
    computing, second, third = (member(str(count), num_computed_tokens=count) for count in (9, 10, 12))
    groups = groups_of(computing, second, third)
    new = member("d")
    groups.add(new)
    assert groups.source(new) is second
    assert groups.leave(second) == []
    assert groups.source(new) is third


def test_without_a_group_there_are_no_siblings():
    groups = groups_of(member("a", None, num_computed_tokens=10))
    new = member("b", None)
    groups.add(new)
    assert (groups.source(new), groups.park(new), groups.leave(new), groups.release(new)) == (None, False, [], [])


@pytest.mark.parametrize("fields", [{"cache_salt": "s"}, {"group_id": "h"}, {"prompt_token_ids": PROMPT[:-1]}])
def test_a_group_is_one_id_prompt_and_salt(fields):
    groups = groups_of(member("a", num_computed_tokens=10))
    other = member("b", **fields)
    groups.add(other)
    assert groups.source(other) is None


def test_the_parked_come_back_when_the_prompt_is_there_or_its_request_gone():
    for ends in ("release", "leave"):
        first, second = member("a"), member("b")
        groups = groups_of(first)
        groups.add(second)
        assert groups.park(second)
        assert (groups.parked, groups.release(first)) == ([second], []), "not yet"
        groups.check_integrity([first])
        first.num_computed_tokens = 10
        with pytest.raises(AssertionError, match="parked for what is computed"):
            groups.check_integrity([first])
        assert getattr(groups, ends)(first) == [second]
        assert groups.parked == []


def test_check_integrity_compares_with_what_runs():
    first = member("a")
    groups = groups_of(first)
    groups.check_integrity([first, member("x", None)])
    with pytest.raises(AssertionError, match="differ"):
        groups.check_integrity([])


def run_choices(group_id: str | None, caching: bool, num_blocks: int = 64, **sampling) -> dict[str, tuple[int, ...]]:
    bench = EngineBench(drafters=(), num_blocks=num_blocks)
    limits = {"max_model_len": bench.runner.max_model_len, "vocab_size": bench.runner.vocab_size}
    config = SchedulerConfig(max_num_batched_tokens=7, max_num_seqs=3, enable_prefix_caching=caching, **limits)
    bench.engine.scheduler = Scheduler(config, BlockPool(num_blocks, bench.runner.block_size))
    for index in range(4):
        request = make_request(f"c{index}", prompt=PROMPT, choice_index=index, max_tokens=12, **sampling)
        assert bench.engine.add(dataclasses.replace(request, group_id=group_id)) is None
    outputs = bench.finish()
    num_copied = sum(len(batch.copy_sources) for batch in bench.runner.batches)
    num_preempted = bench.engine.scheduler.num_preemptions
    if num_blocks == 64:
        assert num_copied == (3 if group_id else 0), "each sibling copies the prompt's last block once"
        assert [outputs[f"c{index}"][0].num_cached_tokens for index in range(1, 3)] == [10, 10] or group_id is None
    else:
        assert num_preempted > 0
    return {request_id: tokens_of(each) for request_id, each in outputs.items()}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 7])
def test_greedy_choices_say_what_they_say_alone(caching, num_blocks):
    expected = greedy_tokens(12, PROMPT)
    assert run_choices("g", caching, num_blocks) == dict.fromkeys(("c0", "c1", "c2", "c3"), expected)


@pytest.mark.parametrize("caching", [True, False])
def test_seeded_choices_differ_and_are_the_same_shared_or_not(caching):
    sampling = {"temperature": 3.0, "seed": 11}
    shared = run_choices("g", caching, **sampling)
    assert len(set(shared.values())) == 4
    assert shared == run_choices(None, caching, **sampling)
