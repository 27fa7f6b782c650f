"""SkyRL at the doors: batches by session, samples with scored prompts, pause and resume, the size of the world."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from fakes.backend import build_tokenizer
from fakes.trainers.skyrl import RemoteInferenceClient
from tiny.rollout_service import Reference, RolloutService

PROMPTS = [[7, 20, 31, 8, 99, 120], [11, 12]]


@pytest.fixture
async def client(service: RolloutService) -> AsyncIterator[Any]:
    async with RemoteInferenceClient(
        proxy_url=service.url, server_urls=[service.url], data_parallel_size=1, model_name="tiny"
    ) as client:
        yield client


def batch(**options: Any) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_tokens": 10, "logprobs": 0}
    return {"prompt_token_ids": PROMPTS, "sampling_params": sampling, "session_ids": ["a", "b"], **options}


async def test_a_batch_has_texts_tokens_and_log_probabilities(client: Any, old: Reference):
    said = await client.generate(batch(cache_salt="0"))
    assert said["response_ids"] == [old.greedy(prompt, 10) for prompt in PROMPTS]
    assert said["stop_reasons"] == ["length", "length"]
    for prompt, ids, logprobs in zip(PROMPTS, said["response_ids"], said["response_logprobs"], strict=True):
        assert logprobs == pytest.approx(old.logprobs(prompt + ids)[len(prompt) - 1 :], abs=1e-4), "at T = 1 if greedy"
    assert said["responses"] == [build_tokenizer().decode(ids) for ids in said["response_ids"]]
    await client.finish_session("a")


async def test_samples_of_a_prompt_that_is_scored(client: Any, old: Reference):
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPTS[0]}]},
        "num_samples": 3,
        "sampling_params": {"temperature": 1.0, "max_tokens": 8, "seed": 11},
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    drawn = await client.sample({"json": body})
    assert len({tuple(sequence["tokens"]) for sequence in drawn["sequences"]}) == 3
    first, *rest = drawn["prompt_logprobs"]
    assert first is None
    assert rest == pytest.approx(old.logprobs(PROMPTS[0]), abs=1e-4)


async def test_pause_and_resume_of_all_servers(service: RolloutService, client: Any, new: Reference):
    assert await client.get_world_size() == (1, 1)
    before = await client.generate(batch())
    assert (await client.pause())[service.url] == {"status": 200, "body": {"status": "paused"}}
    running = asyncio.create_task(client.generate(batch()))
    async with aiohttp.ClientSession() as session:
        body = {"weight_dir": str(service.new), "weight_version": "1"}
        async with session.post(f"{service.url}/update_weights", json=body) as response:
            assert response.status == 200
    assert not running.done()
    assert (await client.resume())[service.url] == {"status": 200, "body": {"status": "resumed"}}
    after = await running
    assert after["response_ids"] == [new.greedy(prompt, 10) for prompt in PROMPTS] != before["response_ids"]


async def test_a_cache_that_is_in_use_is_not_reset(service: RolloutService, client: Any):
    assert (await client.reset_prefix_cache())[service.url]["body"] == {"success": True}
    long = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
    running = asyncio.create_task(client.generate(batch(sampling_params=long)))
    async with asyncio.timeout(20):  # until the requests hold KV
        while (answer := (await client.reset_prefix_cache())[service.url])["body"]["success"]:
            await asyncio.sleep(0.01)
    assert answer == {"status": 200, "body": {"success": False}}
    await running


async def test_methods_of_vllms_workers_are_refused_by_name(client: Any):
    with pytest.raises(aiohttp.ClientResponseError, match="/collective_rpc is not served"):
        await client.start_weight_update()
