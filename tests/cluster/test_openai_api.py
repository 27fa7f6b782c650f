from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
import uvicorn

from fake_backend import FakeBackend, build_gateway, build_tokenizer, says
from outrider.cluster.errors import Overloaded, RequestFailed, Unavailable
from outrider.cluster.openai_api import build_api
from outrider.verifier_service.request import SpeculationMetrics

SPECULATION = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
TEXT = "größer 日本"


async def healthy():
    return True


def client_of(backend, tokenizer, is_healthy=healthy):
    app = build_api(build_gateway(backend, tokenizer), is_healthy, wall_clock=lambda: 1_700_000_000.0)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")


@asynccontextmanager
async def serving(backend, tokenizer):
    app = build_api(build_gateway(backend, tokenizer), healthy)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def backend(tokenizer):
    return FakeBackend(lambda _: says(tokenizer, TEXT), speculation=SPECULATION)


async def test_the_openai_client_is_at_home(tokenizer, backend):
    async with serving(backend, tokenizer) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        assert [model.id async for model in await client.models.list()] == ["tiny"]
        completion = await client.completions.create(model="tiny", prompt="the", n=2, seed=1, max_tokens=30)
        assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
        assert completion.usage.completion_tokens == 2 * len(tokenizer.encode(TEXT))
        assert completion.usage.prompt_tokens == len(tokenizer.encode("the"))
        messages = [{"role": "user", "content": "fox"}]
        chat = await client.chat.completions.create(model="tiny", messages=messages, user="u")
        assert chat.choices[0].message.content == TEXT
        assert chat.choices[0].finish_reason == "length"
        assert chat.model_extra["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 2.5
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model="tiny", prompt="the", logprobs=0)
        assert refused.value.param == "logprobs"


async def test_the_openai_client_streams(tokenizer, backend):
    async with serving(backend, tokenizer) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
        stream = await client.completions.create(model="tiny", prompt=["the", "fox"], stream=True)
        texts = {0: "", 1: ""}
        async for event in stream:
            texts[event.choices[0].index] += event.choices[0].text
        assert texts == {0: TEXT, 1: TEXT}
        stream = await client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "fox"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
        events = [event async for event in stream]
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events[:-1]) == TEXT
    assert events[-2].choices[0].finish_reason == "length"
    assert events[-2].model_extra["metrics"]["speculative_decoding"]["num_accepted_tokens"] == 3
    assert events[-1].usage.completion_tokens == len(tokenizer.encode(TEXT))
    assert events[-1].choices == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_cancels_its_generation(tokenizer, stream):
    backend = FakeBackend(lambda _: [[5], None])
    async with serving(backend, tokenizer) as url:
        async with httpx.AsyncClient() as client:
            body = {"prompt": [[5], [6]], "n": 2, "stream": stream}
            call = asyncio.create_task(client.post(f"{url}/v1/completions", json=body))
            await backend.until_waiting(4)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(5):
            while len(backend.cancelled) < 4:
                await asyncio.sleep(0.005)
    assert sorted(backend.cancelled) == sorted(request.request_id for request in backend.requests)


async def test_chat_goes_through_the_template(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "fox"}]})
    prompt = tokenizer.decode(list(backend.requests[0].prompt_token_ids))
    assert prompt == "<|start|>user\nfox<|end|><|start|>assistant\n"
    assert backend.requests[0].sampling.max_tokens == 64 - len(backend.requests[0].prompt_token_ids)


async def test_every_form_of_prompt(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        for prompt, num_choices in (("a", 1), (["a", "b"], 2), ([5, 6], 1), ([[5], [6], [7]], 3)):
            answer = (await client.post("/v1/completions", json={"prompt": prompt})).json()
            assert [choice["index"] for choice in answer["choices"]] == list(range(num_choices))
    assert len({request.request_id for request in backend.requests}) == 7


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "max_tokens": 1000}, "max_tokens"),
        ({"prompt": "a", "logprobs": 0}, "logprobs"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "tools": [{}]}, "tools"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "x"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ([], None),
    ],
)
async def test_what_would_be_left_undone_is_refused(tokenizer, backend, body, param):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert backend.requests == []


async def test_neutral_values_and_harmless_fields_are_accepted(tokenizer, backend):
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "suffix": None, "logprobs": None}
    harmless = {"user": "u", "metadata": {}, "response_format": {"type": "text"}, "disable_speculative_decoding": True}
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", **neutral, **harmless})
    assert answer.status_code == 200
    assert backend.requests[0].sampling.num_speculative_tokens == 0


async def test_a_typo_gets_a_hint(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "temprature": 1})
    assert "'temperature'" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"), [(Overloaded("full", 2.5), 503), (Unavailable("none"), 503), (RequestFailed("broken"), 500)]
)
async def test_errors_before_the_first_token_have_their_status(tokenizer, stream, error, status):
    async with client_of(FakeBackend(lambda _: [error]), tokenizer) as client:
        answer = await client.post(
            "/v1/completions", json={"prompt": "a", "stream": stream}, headers={"X-Request-Id": "mine"}
        )
    assert answer.status_code == status
    assert answer.json()["error"]["message"] == str(error)
    assert answer.headers.get("retry-after") == ("3" if isinstance(error, Overloaded) else None)
    assert answer.headers["x-request-id"] == "mine"


async def test_an_error_in_mid_stream_is_an_event_and_the_end(tokenizer):
    backend = FakeBackend(lambda _: [tokenizer.encode("a"), RequestFailed("lost")])
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200
    assert events[0]["choices"][0]["text"] == "a"
    assert events[-1]["error"]["message"] == "lost"
    assert len(events) == 2


async def test_request_ids_models_health_and_metrics(tokenizer, backend):
    async with client_of(backend, tokenizer) as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
        assert answer.headers["x-request-id"]
        assert answer.text.endswith("data: [DONE]\n\n")
        missing = await client.post("/v1/completions", json={"prompt": "a", "model": "other"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
        assert (await client.get("/v1/models/tiny")).json()["max_model_len"] == 64
        assert (await client.get("/v1/models/other")).status_code == 404
        assert (await client.get("/nowhere")).json()["error"]["type"] == "invalid_request_error"
        assert (await client.get("/health")).status_code == 200
        assert "vllm:generation_tokens_total" in (await client.get("/metrics")).text

    async def ill():
        return False

    async with client_of(backend, tokenizer, ill) as client:
        assert (await client.get("/health")).status_code == 503


@pytest.mark.parametrize(
    ("messages", "template"),
    [
        ([{"role": "user", "content": "a"}], None),
        ([{"role": "bad", "content": "a"}], "default"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "default"),
        ([], "default"),
    ],
)
async def test_messages_that_do_not_fit_are_refused(tokenizer, backend, messages, template):
    own = tokenizer if template else build_tokenizer(chat_template=None)
    async with client_of(backend, own) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
