from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
import pytest

from fake_backend import FakeBackend, build_gateway, says
from outrider.cluster import errors
from outrider.cluster.gateway import RequestInput
from outrider.verifier_service.request import FinishReason, SpeculationMetrics


async def collect(gateway, **fields):
    return [chunk async for chunk in gateway.generate(gateway.parse(RequestInput(**fields)))]


def text_of(chunks, index=0):
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


async def test_tokens_become_text_and_the_last_chunk_says_how_it_ended(tokenizer):
    speculation = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    backend = FakeBackend(lambda _: says(tokenizer, "größer 日本"), speculation=speculation)
    chunks = await collect(build_gateway(backend, tokenizer), prompt="the quick", max_tokens=40)
    assert text_of(chunks) == "größer 日本"
    assert [id_ for chunk in chunks for id_ in chunk.token_ids] == tokenizer.encode("größer 日本")
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])
    last = chunks[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.speculation is speculation
    assert last.usage.num_prompt_tokens == len(tokenizer.encode("the quick"))
    assert last.usage.num_completion_tokens == len(tokenizer.encode("größer 日本"))
    assert last.usage.num_cached_tokens == 2
    assert backend.cancelled == []


async def test_choices_have_their_own_ids_and_noise(tokenizer):
    backend = FakeBackend(lambda request: says(tokenizer, f"choice {request.sampling.choice_index}"))
    gateway = build_gateway(backend, tokenizer)
    chunks = await collect(gateway, request_id="r", prompt="the", n=3, seed=7)
    assert [text_of(chunks, index) for index in range(3)] == ["choice 0", "choice 1", "choice 2"]
    assert [request.request_id for request in backend.requests] == ["r-0", "r-1", "r-2"]
    assert {request.sampling.seed for request in backend.requests} == {7}
    assert chunks[0].index != chunks[1].index, "choices are interleaved"


async def test_a_stop_string_over_token_and_step_boundaries_ends_text_and_generation(tokenizer):
    before, after = tokenizer.encode("a="), tokenizer.encode("=")
    steps = [before, [*after, *tokenizer.encode("zz")], tokenizer.encode("never"), None]
    backend = FakeBackend(lambda _: steps)
    chunks = await collect(build_gateway(backend, tokenizer), request_id="r", prompt="the", stop="==")
    assert text_of(chunks) == "a"
    assert chunks[-1].finish_reason is FinishReason.STOP
    assert [id_ for chunk in chunks for id_ in chunk.token_ids] == [*before, *after]
    assert chunks[-1].usage.num_completion_tokens == len(before) + len(after)
    assert backend.cancelled == ["r"]


async def test_a_stop_token_ends_the_text_and_is_counted(tokenizer):
    stop_id = tokenizer.encode("x")[0]
    backend = FakeBackend(lambda _: [[*tokenizer.encode("ab"), stop_id]], finish_reason=FinishReason.STOP)
    chunks = await collect(build_gateway(backend, tokenizer), prompt="the", stop_token_ids=[stop_id])
    assert text_of(chunks) == "ab"
    assert chunks[-1].usage.num_completion_tokens == 3


async def test_closing_cancels_every_choice(tokenizer):
    backend = FakeBackend(lambda _: [*says(tokenizer, "ab"), None])
    gateway = build_gateway(backend, tokenizer)
    request = gateway.parse(RequestInput(request_id="r", prompt="the", n=2))
    async with aclosing(gateway.generate(request)) as chunks:
        await anext(chunks)
    assert sorted(backend.cancelled) == ["r-0", "r-1"]
    assert gateway.abort("r") is False


async def test_cancelling_the_task_cancels_the_generation(tokenizer):
    backend = FakeBackend(lambda _: [None])
    task = asyncio.create_task(collect(build_gateway(backend, tokenizer), request_id="r", prompt="the"))
    await backend.until_waiting(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.cancelled == ["r"]


async def test_abort_finishes_what_runs_and_shows_what_was_held_back(tokenizer):
    backend = FakeBackend(lambda _: [*says(tokenizer, "ab="), None])
    gateway = build_gateway(backend, tokenizer)
    task = asyncio.create_task(collect(gateway, request_id="r", prompt="the", stop="=="))
    await backend.until_waiting(1)
    assert gateway.abort("r") is True
    chunks = await task
    assert text_of(chunks) == "ab="
    assert chunks[-1].finish_reason is FinishReason.ABORT
    assert chunks[-1].usage.num_completion_tokens == len(tokenizer.encode("ab="))
    assert backend.cancelled == ["r"]
    assert gateway.abort("r") is False


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (errors.Overloaded("full", 3.0), errors.Overloaded),
        (errors.Unavailable("no verifier"), errors.Unavailable),
        (ZeroDivisionError("secret"), errors.RequestFailed),
    ],
)
async def test_one_choice_that_fails_fails_the_request_and_cancels_the_others(tokenizer, failure, expected):
    backend = FakeBackend(lambda request: [[5], None] if request.sampling.choice_index else [[5], failure])
    gateway = build_gateway(backend, tokenizer)
    with pytest.raises(expected) as raised:
        await collect(gateway, request_id="r", prompt="the", n=2)
    assert "secret" not in str(raised.value)
    assert backend.cancelled == ["r-1"]


async def test_an_engine_error_and_a_stream_that_just_ends_are_failures(tokenizer):
    broken = FakeBackend(lambda _: [[]], finish_reason=FinishReason.ERROR, error="out of blocks")
    with pytest.raises(errors.RequestFailed, match="out of blocks"):
        await collect(build_gateway(broken, tokenizer), prompt="the")
    with pytest.raises(errors.RequestFailed, match="without a finish reason"):
        await collect(build_gateway(FakeBackend(lambda _: [[5]], finish_reason=None), tokenizer), prompt="the")


async def test_an_id_that_runs_is_refused(tokenizer):
    backend = FakeBackend(lambda _: [[5], None])
    gateway = build_gateway(backend, tokenizer)
    async with aclosing(gateway.generate(gateway.parse(RequestInput(request_id="r", prompt="a", n=2)))) as chunks:
        await anext(chunks)
        for taken in ("r", "r-1"):
            with pytest.raises(errors.InvalidRequest, match="already running"):
                await collect(gateway, request_id=taken, prompt="a")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [5, 10_000]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5] * 64}, "prompt"),
        ({"max_tokens": 64}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [10_000]}, "stop_token_ids"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 1 << 63}, "seed"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_naming_the_field(tokenizer, fields, field):
    gateway = build_gateway(FakeBackend(lambda _: []), tokenizer)
    with pytest.raises(errors.InvalidRequest) as raised:
        gateway.parse(RequestInput(**{"prompt": [5], **fields}))
    assert raised.value.field == field
    assert field in str(raised.value)


def test_defaults_and_aliases(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: []), tokenizer)

    def sampling(**fields):
        return gateway.parse(RequestInput(**{"prompt": [5], **fields})).sampling

    assert sampling().max_tokens == 16
    assert sampling(prompt=[5] * 60).max_tokens == 4, "a default shrinks to the context"
    assert sampling(default_max_tokens=None).max_tokens == 63
    assert sampling(top_k=-1).top_k == 0
    assert sampling().num_speculative_tokens is None
    assert sampling(num_speculative_tokens=3).num_speculative_tokens == 3
    assert sampling(num_speculative_tokens=3, disable_spec_decode=True).num_speculative_tokens == 0
    assert gateway.parse(RequestInput(prompt=[5], stop="x")).stop == ("x",)


@pytest.mark.parametrize(
    ("error", "http_status", "grpc_status"),
    [
        (errors.InvalidRequest("x", "n"), 400, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.ModelNotFound("x"), 404, grpc.StatusCode.NOT_FOUND),
        (errors.Overloaded("x"), 503, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unavailable("x"), 503, grpc.StatusCode.UNAVAILABLE),
        (errors.RequestFailed("x"), 500, grpc.StatusCode.INTERNAL),
        (type("Own", (errors.Unavailable,), {})("x"), 503, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_every_error_has_its_row(error, http_status, grpc_status):
    mapping = errors.mapping_of(error)
    assert (mapping.http_status, mapping.grpc_status) == (http_status, grpc_status)
