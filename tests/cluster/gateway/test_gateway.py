from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing

import grpc
import pytest

from fakes.backend import EOS, FakeBackend, build_gateway, fake_logprobs, says
from outrider.cluster.common import errors
from outrider.cluster.gateway.request_parser import RequestInput
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    FinishReason,
    LogprobsMode,
    SamplingParams,
    SpeculationMetrics,
)


async def collect(gateway, **fields):
    return [chunk async for chunk in gateway.generate(await gateway.parse(RequestInput(**fields)))]


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


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1, 1, 1, 2, 1]), (3, [1, 4, 1]), (9, [1, 5])])
async def test_an_event_has_as_many_tokens_as_the_interval_but_the_first_and_the_last(tokenizer, interval, sizes):
    backend = FakeBackend(lambda _: [[10], [11], [12], [13, 14], [15]])
    chunks = await collect(build_gateway(backend, tokenizer, stream_interval=interval), prompt="the")
    assert [len(chunk.token_ids) for chunk in chunks] == sizes
    assert [id_ for chunk in chunks for id_ in chunk.token_ids] == [10, 11, 12, 13, 14, 15]


async def test_who_streams_nothing_gets_a_choice_at_its_end(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: [[10], [11], [12], [13], [14]]), tokenizer)
    request = await gateway.parse(RequestInput(prompt="the"))
    chunks = [chunk async for chunk in gateway.generate(request, whole=True)]
    assert [len(chunk.token_ids) for chunk in chunks] == [1, 4]


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
    request = await gateway.parse(RequestInput(request_id="r", prompt="the", n=2))
    async with aclosing(gateway.generate(request)) as chunks:
        await anext(chunks)
    assert sorted(backend.cancelled) == ["r-0", "r-1"]
    assert gateway.abort("r") is False


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
    request = await gateway.parse(RequestInput(request_id="r", prompt="a", n=2))
    async with aclosing(gateway.generate(request)) as chunks:
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
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"prompt": "a" * 10_000}, "prompt"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"bad_words": [chr(ord("a") + index) * 200 for index in range(20)]}, "bad_words"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"target_inter_token_ms": 0.0}, "target_inter_token_ms"),
        ({"target_inter_token_ms": 60_001}, "target_inter_token_ms"),
        ({"target_inter_token_ms": float("inf")}, "target_inter_token_ms"),
        ({"target_inter_token_ms": float("nan")}, "target_inter_token_ms"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids"),
        ({"stop": "s" * 1025}, "stop"),
        ({"request_id": "r" * 129}, "request_id"),
        ({"logprobs_mode": "processed_logprobs", "rejection_sample_method": "typical"}, "logprobs_mode"),
    ],
)
async def test_what_cannot_be_served_is_refused_naming_the_field(tokenizer, fields, field):
    gateway = build_gateway(FakeBackend(lambda _: []), tokenizer, allows_lossy=True)
    with pytest.raises(errors.InvalidRequest) as raised:
        await gateway.parse(RequestInput(**{"prompt": [5], **fields}))
    assert raised.value.field == field
    assert field in str(raised.value)


async def test_defaults_and_aliases(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: []), tokenizer)

    async def sampling(**fields):
        return (await gateway.parse(RequestInput(**{"prompt": [5], **fields}))).sampling

    assert await sampling() == SamplingParams()
    assert (await sampling(prompt=[5] * 60)).max_tokens == 4, "a default shrinks to the context"
    assert (await sampling(prompt=[5] * 60, max_tokens=64)).max_tokens == 4, "and so does what is asked for"
    assert (await sampling(default_max_tokens=None)).max_tokens == 63
    assert (await sampling(top_k=-1)).top_k == 0
    assert (await sampling(top_k=1 << 70)).top_k == 0, "more than there are: off, and fit for the wire"
    assert (await sampling(num_speculative_tokens=3)).num_speculative_tokens == 3
    assert (await sampling(num_speculative_tokens=1 << 70)).num_speculative_tokens == 64
    assert (await sampling(num_speculative_tokens=3, disable_spec_decode=True)).num_speculative_tokens == 0
    assert (await gateway.parse(RequestInput(prompt=[5], stop="x"))).stop == ("x",)


async def test_what_a_request_leaves_open_is_the_models(tokenizer):
    defaults = {"temperature": 0.25, "top_k": 1 << 20, "top_p": 0.5, "repetition_penalty": 1.5, "max_tokens": 7}
    gateway = build_gateway(FakeBackend(lambda _: []), tokenizer, sampling_defaults=defaults)

    async def sampling(**fields):
        return (await gateway.parse(RequestInput(**{"prompt": [5], **fields}))).sampling

    own = SamplingParams(temperature=0.25, top_p=0.5, repetition_penalty=1.5, max_tokens=7)  # top_k: all there are
    assert await sampling() == await sampling(max_tokens=9) == await sampling(default_max_tokens=None) == own
    assert (await sampling(max_tokens=3)).max_tokens == 3
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    assert await sampling(**given) == SamplingParams(max_tokens=7)


async def test_the_servers_mode_is_for_requests_with_logprobs(tokenizer):
    """Others may be judged by a lossy rule; those name both fields when they are refused."""
    backend = FakeBackend(lambda _: [[5]])
    gateway = build_gateway(backend, tokenizer, logprobs_mode=LogprobsMode.PROCESSED, allows_lossy=True)

    async def mode(**fields) -> LogprobsMode:
        return (await gateway.parse(RequestInput(prompt=[5], **fields))).sampling.logprobs_mode

    assert await mode() is await mode(rejection_sample_method="typical") is LogprobsMode.RAW
    assert await mode(logprobs=0) is await mode(prompt_logprobs=0) is LogprobsMode.PROCESSED
    assert await mode(logprobs=0, logprobs_mode="raw_logprobs") is LogprobsMode.RAW
    with pytest.raises(errors.InvalidRequest) as raised:
        await mode(logprobs=0, rejection_sample_method="typical")
    assert raised.value.field == "logprobs_mode"
    assert "rejection_sample_method" in str(raised.value)


async def test_in_rollouts_a_lossy_rule_is_refused(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: [[5]]), tokenizer, rollouts=True, allows_lossy=True)
    for fields in ({}, {"logprobs": 0, "logprobs_mode": "processed_logprobs"}):
        with pytest.raises(errors.InvalidRequest, match="lossless in rollouts") as raised:
            await gateway.parse(RequestInput(prompt=[5], rejection_sample_method="typical", **fields))
        assert raised.value.field == "rejection_sample_method"
    await gateway.parse(RequestInput(prompt=[5], rejection_sample_method="block"))


async def test_a_lossy_rule_is_for_services_that_allow_it(tokenizer):
    for is_allowed in (True, False):
        gateway = build_gateway(FakeBackend(lambda _: [[5]]), tokenizer, allows_lossy=is_allowed)
        request = RequestInput(prompt=[5], rejection_sample_method="typical")
        if is_allowed:
            assert (await gateway.parse(request)).sampling.acceptance is AcceptanceRule.TYPICAL
            continue
        with pytest.raises(errors.InvalidRequest, match="allow-typical-acceptance") as raised:
            await gateway.parse(request)
        assert raised.value.field == "rejection_sample_method"


async def test_strangers_are_not_told_what_was_in_the_prefix_cache(tokenizer):
    for tells_cached, expected in ((True, 2), (False, 0)):
        backend = FakeBackend(lambda _: [[5]])
        gateway = build_gateway(backend, tokenizer, tells_cached=tells_cached)
        chunks = await collect(gateway, prompt=[5, 6, 7, 8])
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.num_cached_tokens == expected


async def test_elsewhere_what_shall_not_be_stored_is_filed_nowhere_either(tokenizer):
    backend = FakeBackend(lambda _: [[5]])
    for store, key in ((False, ""), (True, None), (None, None)):
        await collect(build_gateway(backend, tokenizer), prompt=[5], store=store)
        assert backend.requests.pop().history_key == key


async def test_choices_of_one_prompt_are_a_group_of_their_own(tokenizer):
    backend = FakeBackend(lambda _: [[5]])
    gateway = build_gateway(backend, tokenizer)
    for _ in range(2):
        await collect(gateway, request_id="r", prompt=[5], n=2)
    first, second, third, fourth = [request.group_id for request in backend.requests]
    assert (first, third) == (second, fourth)
    assert None not in (first, third)
    assert first != third, "two requests may have the same id elsewhere, never the same group"


async def test_special_tokens_and_the_stop_token_are_shown_on_request(tokenizer):
    start, eos = tokenizer.convert_tokens_to_ids(["<|start|>", EOS])
    backend = FakeBackend(lambda _: [[start, *tokenizer.encode("a"), eos]], finish_reason=FinishReason.STOP)
    gateway = build_gateway(backend, tokenizer)
    assert text_of(await collect(gateway, prompt="the")) == "a"
    assert text_of(await collect(gateway, prompt="the", skip_special_tokens=False)) == "<|start|>a"
    shown = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    assert text_of(await collect(gateway, prompt="the", **shown)) == f"<|start|>a{EOS}"


async def test_nothing_is_shown_of_a_request_for_the_prompt_alone(tokenizer):
    backend = FakeBackend(lambda _: [[5], None])
    gateway = build_gateway(backend, tokenizer)
    chunks = await collect(gateway, prompt=[5, 6], max_tokens=0, echo=True, logprobs=1)
    assert [chunk.tokens for chunk in chunks] == [()]
    assert chunks[0].finish_reason is FinishReason.LENGTH
    assert chunks[0].prompt_logprobs == (None, fake_logprobs(6, 1))
    assert backend.requests[0].sampling.max_tokens == 1


async def test_a_client_that_reads_slowly_gets_what_came_meanwhile_at_once(tokenizer):
    ids = tokenizer.encode("ab" * 10)
    backend = FakeBackend(lambda _: [[id_] for id_ in ids])
    gateway = build_gateway(backend, tokenizer)
    num_chunks, seen = 0, []
    async for chunk in gateway.generate(await gateway.parse(RequestInput(prompt=[5], n=2, max_tokens=40))):
        num_chunks += 1
        seen += [chunk.index] * len(chunk.tokens)
        for _ in range(10):
            await asyncio.sleep(0)
    assert seen.count(0) == seen.count(1) == len(ids)
    assert num_chunks < len(ids)


async def test_draining_loses_neither_running_requests_nor_those_that_a_server_has_just_taken(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: says(tokenizer, "ab")), tokenizer)
    first, second = [await gateway.parse(RequestInput(prompt=[5])) for _ in range(2)]
    async with aclosing(gateway.generate(first)) as chunks:
        texts = [(await anext(chunks)).text]
        assert gateway.num_running == 1
        gateway.drain()
        assert gateway.is_draining
        assert "".join([chunk.text async for chunk in gateway.generate(second)]) == "ab"
        texts += [chunk.text async for chunk in chunks]
    assert "".join(texts) == "ab"
    assert gateway.num_running == 0


async def test_a_long_prompt_does_not_hold_up_the_event_loop(tokenizer):
    gateway = build_gateway(FakeBackend(lambda _: []), tokenizer, max_model_len=1 << 20)
    parsing = asyncio.create_task(gateway.parse(RequestInput(prompt="the quick brown fox " * 20_000)))
    num_turns = 0
    while not parsing.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 3, "others had their turn while the prompt was tokenised"
    assert len(parsing.result().prompt_token_ids) > 10_000


@pytest.mark.parametrize(
    ("script", "status"), [([[5], [6, 7]], "ok"), ([[5], errors.Overloaded("full")], "Overloaded")]
)
async def test_every_request_leaves_one_record_without_its_text(tokenizer, caplog, script, status):
    speculation = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    gateway = build_gateway(FakeBackend(lambda _: script, speculation=speculation), tokenizer)
    with caplog.at_level("INFO", "outrider.request"), contextlib.suppress(errors.Overloaded):
        await collect(gateway, request_id="r", prompt="secret")
    (record,) = [record for record in caplog.records if record.name == "outrider.request"]
    assert (record.request_id, record.status) == ("r", status)
    assert record.num_prompt_tokens == len(tokenizer.encode("secret"))
    assert record.num_completion_tokens == (3 if status == "ok" else 1)
    assert record.finish_reason == ("length" if status == "ok" else "")
    assert record.acceptance == (0.5 if status == "ok" else None)
    assert 0 < record.ttft_s < record.e2e_s
    assert "secret" not in str(vars(record))


@pytest.mark.parametrize(
    ("error", "http_status", "grpc_status"),
    [
        (errors.InvalidRequest("x", "n"), 400, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.ModelNotFound("x"), 404, grpc.StatusCode.NOT_FOUND),
        (errors.Overloaded("x"), 429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        (errors.Unavailable("x"), 503, grpc.StatusCode.UNAVAILABLE),
        (errors.RequestFailed("x"), 500, grpc.StatusCode.INTERNAL),
        (errors.BodyTooLarge("x"), 413, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.BodyTooSlow("x"), 408, grpc.StatusCode.INVALID_ARGUMENT),
        (errors.Unauthenticated("x"), 401, grpc.StatusCode.UNAUTHENTICATED),
        (type("Own", (errors.Unavailable,), {})("x"), 503, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_every_error_has_its_row(error, http_status, grpc_status):
    mapping = errors.mapping_of(error)
    assert (mapping.http_status, mapping.grpc_status) == (http_status, grpc_status)


def test_what_an_error_quotes_is_bounded():
    error = errors.InvalidRequest("unknown field " + "x" * 5000, "x" * 5000)
    assert len(errors.text_of(error)) <= errors.MAX_TEXT_CHARS + 1
    assert len(errors.field_of(error)) == errors.MAX_TEXT_CHARS
