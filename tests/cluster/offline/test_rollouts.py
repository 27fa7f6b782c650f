"""Rollouts in one process: histories change how much is drafted, and no token; other prompts never see them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.offline.engine import OfflineEngine
from outrider.verifier_service.messages.history import filed_under
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput, SamplingParams, SpeculationPlan

LOOK_UPS = {"method": "suffix", "location": "verifier", "num_speculative_tokens": 8}
PLAN = SpeculationPlan(draft_length=8, is_pinned=True)
PROMPTS = (tuple(range(100, 130)), tuple(range(300, 320)))


def engine(*, rollouts: bool, drafter_process: bool = False, **options: object) -> OfflineEngine:
    config = {"speculative_config": LOOK_UPS, "rollouts": rollouts, "dtype": "float32", "threads_per_rank": 1}
    config["kv_cache_memory_bytes"] = 32 << 20
    return OfflineEngine(ServiceConfig(**{**config, **options}), drafter_process=drafter_process)


def epoch(
    offline: OfflineEngine,
    name: str,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    memory: RolloutMemory | None = None,
    **fields: object,
):
    """Run a greedy and a seeded sample of each prompt; return their tokens, and the accepted draft tokens of all.

    `memory`: a gateway's, from which the requests take their histories along.
    """
    requests = [
        GenerationRequest(
            request_id=f"{name} {place} {seed}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(
                temperature=0.0 if seed is None else 1.0, seed=seed, max_tokens=24, ignore_eos=True
            ),
            plan=PLAN,
            **fields,
        )
        for place, prompt in enumerate(prompts)
        for seed in (None, 3)
    ]
    if memory is not None:
        with contextlib.ExitStack() as stack:
            requests = [stack.enter_context(memory.sampling(request, "v")).request for request in requests]
    tokens: dict[str, list[int]] = {request.request_id.split(" ", 1)[1]: [] for request in requests}
    last: dict[str, RequestOutput] = {}
    for output in offline.generate(requests):
        tokens[output.request_id.split(" ", 1)[1]] += output.token_ids
        last[output.request_id] = output
    metrics = [output.speculation for output in last.values()]
    return tokens, sum(each.num_accepted_tokens for each in metrics if each is not None)


def test_histories_bring_drafts_and_change_no_token():
    with engine(rollouts=False, num_speculative_tokens=0) as offline:
        plain, _ = epoch(offline, "plain")
    with engine(rollouts=True) as offline:
        first, cold = epoch(offline, "first", cache_salt="policy 1")
        again, warm = epoch(offline, "again", cache_salt="policy 2")
    assert plain == first == again
    assert warm > cold + 24, "the second epoch drafts from the first"


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("location", ["verifier", "pool"])
def test_another_engine_drafts_from_what_requests_bring_and_changes_no_token(location: str):
    memory = RolloutMemory()
    with engine(rollouts=True) as offline:
        first, cold = epoch(offline, "first")
    for place, prompt in enumerate(PROMPTS):
        for seed in (None, 3):
            memory.record(filed_under(None, prompt), first[f"{place} {seed}"], "1")
    look_ups = {**LOOK_UPS, "location": location}
    with engine(rollouts=True, speculative_config=look_ups, drafter_process=location == "pool") as offline:
        assert bool(offline.drafter_pids) == (location == "pool")
        again, warm = epoch(offline, "again", memory=memory)
    assert first == again
    assert warm > cold + 24


def test_elsewhere_a_salt_is_a_border_and_a_key_finds_nothing():
    with engine(rollouts=False) as offline:
        _, cold = epoch(offline, "first", cache_salt="mine")
        _, theirs = epoch(offline, "second", cache_salt="theirs", history_key="k")
        _, mine = epoch(offline, "third", cache_salt="mine")
    assert theirs == cold < mine


def test_what_was_declined_is_not_found():
    with engine(rollouts=True) as offline:
        _, cold = epoch(offline, "first", history_key="")
        _, second = epoch(offline, "second")
        _, third = epoch(offline, "third", history_key="")
    assert cold == third
    assert second <= cold + 12, "samples of one prompt may see one another, and nothing of the first epoch"
