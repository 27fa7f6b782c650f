"""prime-rl at the doors: health, weights from a folder between pause and resume, tokens with log probabilities."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fakes.trainers.prime_rl import (
    PlainRenderer,
    check_health,
    generate,
    maybe_check_has_model,
    prefill_logprobs,
    update_weights,
)
from tiny.rollout_service import Reference, RolloutService

PROMPT = [7, 20, 31, 8, 99, 120]
GREEDY = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture
async def admin(service: RolloutService) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=service.url, timeout=60.0) as client:
        yield client


@pytest.fixture
async def client(service: RolloutService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="EMPTY") as client:
        yield client


async def ask(client: openai.AsyncOpenAI, **options: Any) -> dict[str, Any]:
    fields = {"prompt_ids": PROMPT, "sampling_params": GREEDY, **options}
    return dict(await generate(client=client, renderer=PlainRenderer(), messages=[], model="tiny", **fields))


def broadcast(service: RolloutService, folder: Path, step: int, source: Path | None = None) -> Path:
    """Write weights to where prime-rl's trainer writes those of a step."""
    place = folder / "broadcasts" / f"step_{step}"
    shutil.copytree(source or service.new, place)
    (place / "STABLE").touch()
    return place


async def test_the_pool_is_ready_and_has_the_model(admin: httpx.AsyncClient):
    await check_health([admin], timeout=5)
    await maybe_check_has_model([admin], "tiny")
    with pytest.raises(ValueError, match="another"):
        await maybe_check_has_model([admin], "another")


async def test_every_token_has_its_log_probability(client: openai.AsyncOpenAI, old: Reference):
    drawn = await ask(client, sampling_params={"temperature": 0.8, "seed": 3, "max_tokens": 20}, cache_salt="0")
    assert drawn["finish_reason"] == "length"
    assert drawn["prompt_ids"] == PROMPT
    expected = old.logprobs(PROMPT + drawn["completion_ids"], 0.8)[len(PROMPT) - 1 :]
    assert drawn["completion_logprobs"] == pytest.approx(expected, abs=1e-4)
    assert (await ask(client))["completion_ids"] == old.greedy(PROMPT, 12)


async def test_without_a_limit_an_answer_goes_on(client: openai.AsyncOpenAI, old: Reference):
    said = old.greedy(PROMPT, 30)
    stop = next(id_ for index, id_ in enumerate(said) if index > 16 and id_ not in said[:index])
    renderer = PlainRenderer()
    renderer.get_stop_token_ids = lambda: [stop]  # type: ignore[method-assign]
    fields: dict[str, Any] = {"prompt_ids": PROMPT, "sampling_params": {"temperature": 0.0}}
    answer = await generate(client=client, renderer=renderer, messages=[], model="tiny", **fields)
    assert answer["completion_ids"] == said[: said.index(stop) + 1]
    assert answer["finish_reason"] == "stop"


async def test_prompts_are_scored(client: openai.AsyncOpenAI, old: Reference):
    scored = await prefill_logprobs(client, "tiny", PROMPT)
    assert scored == pytest.approx([0.0, *old.logprobs(PROMPT)], abs=1e-4)


async def test_weights_of_a_step_there_and_back(
    service: RolloutService,
    admin: httpx.AsyncClient,
    client: openai.AsyncOpenAI,
    old: Reference,
    new: Reference,
    tmp_path: Path,
):
    assert (await ask(client, cache_salt="0"))["completion_ids"] == old.greedy(PROMPT, 12)
    await update_weights([admin], broadcast(service, tmp_path, 41), step=41)
    for salt in ("0", "41"):  # the client's salt is not what keeps KV of old weights out
        assert (await ask(client, cache_salt=salt))["completion_ids"] == new.greedy(PROMPT, 12)
    assert (await admin.get("/weight_info")).json()["weight_version"] == "41"
    await update_weights([admin], broadcast(service, tmp_path, 42, service.old), step=42)
    assert (await ask(client, cache_salt="42"))["completion_ids"] == old.greedy(PROMPT, 12)


async def test_calls_that_arrive_twice_change_nothing(
    service: RolloutService, admin: httpx.AsyncClient, client: openai.AsyncOpenAI, new: Reference, tmp_path: Path
):
    body = {"weight_dir": str(broadcast(service, tmp_path, 3))}
    for _ in range(2):
        assert (await admin.post("/pause", params={"mode": "keep", "clear_cache": "false"})).status_code == 200
    answers = await asyncio.gather(*(admin.post("/update_weights", json=body) for _ in range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    for _ in range(2):
        assert (await admin.post("/resume")).status_code == 200
    assert (await admin.get("/weight_info")).json()["weight_version"] == "3"
    assert (await ask(client))["completion_ids"] == new.greedy(PROMPT, 12)


async def test_requests_are_frozen_by_an_update_and_go_on(
    service: RolloutService, admin: httpx.AsyncClient, client: openai.AsyncOpenAI, tmp_path: Path
):
    calls = [
        asyncio.create_task(ask(client, sampling_params={"temperature": 0.0, "max_tokens": 120, "ignore_eos": True}))
        for _ in range(3)
    ]
    async with asyncio.timeout(20):
        while (await admin.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] < 3:
            await asyncio.sleep(0.01)
    await update_weights([admin], broadcast(service, tmp_path, 5), step=5)
    for answer in await asyncio.gather(*calls):
        assert len(answer["completion_ids"]) == len(answer["completion_logprobs"]) == 120
        assert answer["finish_reason"] == "length"


async def test_a_broadcast_that_we_do_not_speak_is_refused_at_once(
    admin: httpx.AsyncClient, client: openai.AsyncOpenAI, old: Reference
):
    with pytest.raises(httpx.HTTPStatusError) as refused:
        await update_weights([admin], None)
    assert refused.value.response.status_code == 400, "a client tries again after a 5xx"
    assert "weight_dir" in refused.value.response.json()["error"]["message"]
    assert (await admin.get("/is_paused")).json() == {"is_paused": False}
    assert (await ask(client))["completion_ids"] == old.greedy(PROMPT, 12)
    assert (await admin.post("/init_broadcaster", json={})).status_code == 404, "the client then does without"
