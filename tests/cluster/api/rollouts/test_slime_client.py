"""slime at the doors: discovery, generation, streams, weights by group and folder, versions, abort."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests

from fakes.trainers.slime import abort_until_idle, engine_at, get_server_info, payload, post, stream
from tiny.refits import Trainer, tensors_of, trainer
from tiny.rollout_service import Reference, RolloutService

PROMPT = [7, 20, 31, 8, 99, 120]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
LONG = {"temperature": 0.0, "max_new_tokens": 240, "ignore_eos": True}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=60.0) as client:
        yield client


def tokens(output: dict[str, Any]) -> list[int]:
    """Return the tokens as slime takes them: from the log probabilities alone."""
    return [item[1] for item in output["meta_info"]["output_token_logprobs"]]


def ask(service: RolloutService, **sampling: Any) -> dict[str, Any]:
    answer = requests.post(f"{service.url}/generate", json=payload(PROMPT, **sampling))
    answer.raise_for_status()
    return dict(answer.json())


def join(engine: Any, peer: Trainer) -> str:
    """Form the trainer's group; return its name."""
    joining = peer.joins()
    fields = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
    engine.init_weights_update_group(**{name: getattr(joining, name) for name in fields})
    return joining.group_name


def send(engine: Any, peer: Trainer, folder: Path, names: list[str], version: str) -> None:
    """Broadcast one bucket; the call and the broadcast wait for each other."""
    message = peer.sends(str(folder), names)
    engine.update_weights_from_distributed(
        names=list(message.names),
        dtypes=list(message.dtypes),
        shapes=[list(shape) for shape in message.shapes],
        group_name=message.group_name,
        weight_version=version,
    )


def test_an_engine_that_runs_is_found(service: RolloutService):
    info = get_server_info(service.url)
    assert {name: info[name] for name in ("tp_size", "pp_size", "dp_size", "ep_size", "num_gpus")} == {
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "num_gpus": 1,
    }
    assert info["disaggregation_mode"] == "null", "a worker of neither prefill nor decode"
    assert info["enable_memory_saver"] is False, "slime compares it with its own option"
    assert engine_at(service.url).health_generate()


async def test_tokens_log_probabilities_and_counts(service: RolloutService, old: Reference, client: httpx.AsyncClient):
    output = await post(client, f"{service.url}/generate", payload(PROMPT, **GREEDY))
    meta = output["meta_info"]
    assert tokens(output) == output["output_ids"] == old.greedy(PROMPT, 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (6, 12)
    assert (meta["weight_version"], meta["weight_versions"]) == (
        "default",
        [{"version": "default", "start": 0, "end": 12}],
    )
    assert isinstance(meta["cached_tokens"], int)
    drawn = await post(client, f"{service.url}/generate", payload(PROMPT, temperature=0.6, sampling_seed=5))
    logprobs = [item[0] for item in drawn["meta_info"]["output_token_logprobs"]]
    assert logprobs == pytest.approx(old.logprobs(PROMPT + tokens(drawn), 0.6)[len(PROMPT) - 1 :], abs=1e-4)


async def test_a_body_that_slimes_router_has_written_anew(
    service: RolloutService, old: Reference, client: httpx.AsyncClient
):
    """sglang-router 0.3.2 names fields that nobody sent."""
    off = ("return_text_in_logprobs", "return_hidden_states", "background", "no_logs", "return_bytes", "return_entropy")
    written = {"model": None, "stream": False, "log_metrics": True, **dict.fromkeys(off, False)}
    output = await post(client, f"{service.url}/generate", payload(PROMPT, **GREEDY) | written)
    assert tokens(output) == old.greedy(PROMPT, 12)


async def test_a_stop_token_stays_and_is_named(service: RolloutService, old: Reference, client: httpx.AsyncClient):
    said = old.greedy(PROMPT, 5)
    output = await post(client, f"{service.url}/generate", payload(PROMPT, **GREEDY, stop_token_ids=[said[-1]]))
    stopped = said[: said.index(said[-1]) + 1]
    assert tokens(output) == stopped
    assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": said[-1]}


async def test_a_batch_and_several_samples_are_lists(
    service: RolloutService, old: Reference, client: httpx.AsyncClient
):
    other = [11, 12]
    body = payload(PROMPT, **GREEDY) | {"input_ids": [PROMPT, other], "rid": ["one", "two"]}
    outputs = await post(client, f"{service.url}/generate", body)
    assert [tokens(output) for output in outputs] == [old.greedy(PROMPT, 12), old.greedy(other, 12)]
    assert [output["meta_info"]["id"] for output in outputs] == ["one", "two"]
    samples = await post(client, f"{service.url}/generate", payload(PROMPT, n=3, sampling_seed=1))
    assert len({tuple(tokens(output)) for output in samples}) == 3


async def test_prompts_are_scored(service: RolloutService, old: Reference, client: httpx.AsyncClient):
    body = payload(PROMPT, temperature=1.0, max_new_tokens=0) | {"logprob_start_len": 0}
    output = await post(client, f"{service.url}/generate", body)
    scored = output["meta_info"]["input_token_logprobs"]
    assert [item[1] for item in scored] == PROMPT
    assert scored[0][0] is None
    assert [item[0] for item in scored[1:]] == pytest.approx(old.logprobs(PROMPT), abs=1e-4)
    assert tokens(output) == []


async def test_a_streams_events_are_cumulative(service: RolloutService, old: Reference, client: httpx.AsyncClient):
    events = [event async for event in stream(client, f"{service.url}/generate", payload(PROMPT, **GREEDY))]
    expected = old.greedy(PROMPT, 12)
    for event in events:
        assert tokens(event) == event["output_ids"] == expected[: len(event["output_ids"])]
    assert [bool(event["meta_info"]["finish_reason"]) for event in events] == [False] * (len(events) - 1) + [True]
    assert tokens(events[-1]) == expected


def test_buckets_from_a_group_are_one_update(service: RolloutService, old: Reference, new: Reference):
    engine = engine_at(service.url)
    with trainer() as peer:
        group = join(engine, peer)
        for folder, reference, version in ((service.new, new, "1"), (service.old, old, "2")):
            before = engine.get_weight_version()
            engine.pause_generation()
            engine.flush_cache()
            names = list(tensors_of(str(folder)))
            for bucket in (names[:5], names[5:9], names[9:]):
                assert engine.get_weight_version() == before, "half of an update is none"
                send(engine, peer, folder, bucket, version)
            assert engine.get_weight_version() == version
            engine.continue_generation()
            output = ask(service, **GREEDY)
            assert tokens(output) == reference.greedy(PROMPT, 12)
            assert output["meta_info"]["weight_version"] == version
        engine.destroy_weights_update_group(group)


def test_a_half_update_does_not_go_on(service: RolloutService, old: Reference):
    engine = engine_at(service.url)
    with trainer() as peer:
        group = join(engine, peer)
        engine.pause_generation()
        send(engine, peer, service.new, ["model.norm.weight"], "1")
        with pytest.raises(requests.HTTPError):
            engine.continue_generation()
        engine.destroy_weights_update_group(group)
        engine.continue_generation()
    assert tokens(ask(service, **GREEDY)) == old.greedy(PROMPT, 12)
    assert engine.get_weight_version() == "default"


def test_a_folder_may_go_once_it_is_taken(service: RolloutService, new: Reference, tmp_path: Path):
    engine = engine_at(service.url)
    folder = tmp_path / "weight_v000007"
    shutil.copytree(service.new, folder)
    ask(service, **GREEDY)  # leaves KV of the old weights
    engine.pause_generation()
    engine.flush_cache()
    assert engine.update_weights_from_disk(str(folder), weight_version="7")["success"] is True
    assert engine.get_weight_version() == "7"
    shutil.rmtree(folder)
    engine.continue_generation()
    assert tokens(ask(service, **GREEDY)) == new.greedy(PROMPT, 12)


def test_a_folder_that_does_not_fit_changes_nothing(service: RolloutService, old: Reference, tmp_path: Path):
    engine = engine_at(service.url)
    with pytest.raises(requests.HTTPError) as refused:
        engine.update_weights_from_disk(str(tmp_path / "none"), weight_version="7")
    assert refused.value.response.status_code == 400
    assert refused.value.response.json()["success"] is False
    assert engine.get_weight_version() == "default"
    assert tokens(ask(service, **GREEDY)) == old.greedy(PROMPT, 12)


async def test_all_are_aborted_with_what_they_have_and_go_on_from_there(
    service: RolloutService, old: Reference, client: httpx.AsyncClient
):
    url = f"{service.url}/generate"
    calls = [asyncio.create_task(post(client, url, payload(PROMPT, **LONG))) for _ in range(2)]
    async for _ in stream(client, url, payload(PROMPT, **LONG)):
        break  # this one runs, so do those before it
    await abort_until_idle(client, service.url)
    for output in await asyncio.gather(*calls):
        part = tokens(output)
        assert output["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(part) < LONG["max_new_tokens"]
        rest = await post(client, url, payload(PROMPT + part, **GREEDY))
        assert part + tokens(rest) == old.greedy(PROMPT, len(part) + 12)


async def test_one_is_aborted_by_its_id(service: RolloutService, client: httpx.AsyncClient):
    async for event in stream(client, f"{service.url}/generate", payload(PROMPT, **LONG) | {"rid": "mine"}):
        if event["meta_info"]["finish_reason"] is None:
            await post(client, f"{service.url}/abort_request", {"rid": "not mine"})
            await post(client, f"{service.url}/abort_request", {"rid": "mine"})
    assert event["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_pause_aborts_and_new_requests_wait(service: RolloutService, old: Reference, client: httpx.AsyncClient):
    engine, url = engine_at(service.url), f"{service.url}/generate"
    running = stream(client, url, payload(PROMPT, **LONG))
    await anext(running)
    with ThreadPoolExecutor() as threads:
        await asyncio.wrap_future(threads.submit(engine.pause_generation))
        async for event in running:
            last = event
        assert last["meta_info"]["finish_reason"]["type"] == "abort"
        waiting = asyncio.create_task(post(client, url, payload(PROMPT, **GREEDY)))
        assert await asyncio.wrap_future(threads.submit(engine.health_generate)), "a pause is no illness"
        assert not waiting.done()
        await asyncio.wrap_future(threads.submit(engine.continue_generation))
    assert tokens(await waiting) == old.greedy(PROMPT, 12)


async def test_an_update_in_mid_answer_is_a_span(service: RolloutService, client: httpx.AsyncClient):
    running = stream(client, f"{service.url}/generate", payload(PROMPT, **LONG))
    await anext(running)
    await post(client, f"{service.url}/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(service.new), "weight_version": "8"}
    assert (await post(client, f"{service.url}/update_weights_from_disk", body))["success"] is True
    await post(client, f"{service.url}/continue_generation", {})
    async for event in running:
        if len(event["meta_info"]["weight_versions"]) > 1:
            break
    await running.aclose()
    first, second = event["meta_info"]["weight_versions"]
    assert (first["version"], first["start"], second["version"]) == ("default", 0, "8")
    assert 0 < first["end"] == second["start"] < second["end"] == len(event["output_ids"])
    assert event["meta_info"]["weight_version"] == "8"
