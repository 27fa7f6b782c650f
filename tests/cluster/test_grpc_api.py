from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fake_backend import FakeBackend, build_gateway, says
from outrider.cluster.errors import Overloaded
from outrider.cluster.grpc_api import SERVICE_NAME, start_grpc_server
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc
from outrider.verifier_service.request import SpeculationMetrics


@asynccontextmanager
async def serving(backend, tokenizer):
    running = await start_grpc_server(build_gateway(backend, tokenizer), "127.0.0.1:0")
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{running.port}")
    try:
        yield running, channel, generation_pb2_grpc.InferenceStub(channel)
    finally:
        await channel.close()
        await running.server.stop(None)


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.005)


async def test_stream_and_unary_agree(tokenizer):
    speculation = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    backend = FakeBackend(lambda _: says(tokenizer, "日本 fox"), speculation=speculation)
    request = pb.GenerateRequest(request_id="r", text="the", sampling=pb.SamplingParams(n=2, seed=3, temperature=0.5))
    async with serving(backend, tokenizer) as (_, _, stub):
        chunks = [chunk async for chunk in stub.Generate(request)]
        answer = await stub.GenerateUnary(request)
    for choice in answer.choices:
        mine = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in mine) == choice.text == "日本 fox"
        assert [id_ for chunk in mine for id_ in chunk.token_ids] == list(choice.token_ids)
        assert mine[-1].finish_reason == choice.finish_reason == pb.FINISH_REASON_LENGTH
        assert choice.speculative_decoding.mean_acceptance_length == 2.5
    assert answer.usage.completion_tokens == 2 * len(tokenizer.encode("日本 fox"))
    assert answer.usage.prompt_tokens == len(tokenizer.encode("the"))
    assert backend.requests[0].sampling.temperature == 0.5
    assert backend.requests[0].sampling.top_p == 1.0, "an absent field takes the default"


@pytest.mark.parametrize(
    ("request_", "detail"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9999])), "token_ids"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(max_tokens=0)), "max_tokens"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_p=0.0)), "top_p"),
    ],
)
async def test_bad_arguments_are_named(tokenizer, request_, detail):
    async with serving(FakeBackend(lambda _: [[5]]), tokenizer) as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await stub.GenerateUnary(request_)
        with pytest.raises(grpc.aio.AioRpcError) as stream:
            [chunk async for chunk in stub.Generate(request_)]
    for raised in (unary, stream):
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert detail in raised.value.details()


async def test_overload_says_when_to_come_back(tokenizer):
    async with serving(FakeBackend(lambda _: [Overloaded("full", 2.5)]), tokenizer) as (_, _, stub):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GenerateUnary(pb.GenerateRequest(text="a"))
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(raised.value.trailing_metadata())["retry-after"] == "3"


async def test_a_cancelled_call_and_a_deadline_stop_the_generation(tokenizer):
    backend = FakeBackend(lambda _: [[5], None])
    async with serving(backend, tokenizer) as (_, _, stub):
        call = stub.Generate(pb.GenerateRequest(request_id="cancelled", text="a"))
        await call.read()
        call.cancel()
        await until(lambda: backend.cancelled == ["cancelled"])
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GenerateUnary(pb.GenerateRequest(request_id="late", text="a"), timeout=0.2)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: backend.cancelled == ["cancelled", "late"])


async def test_abort_ends_a_stream_with_its_reason(tokenizer):
    backend = FakeBackend(lambda _: [[5], None])
    async with serving(backend, tokenizer) as (_, _, stub):
        call = stub.Generate(pb.GenerateRequest(request_id="r", text="a"))
        await call.read()
        assert list((await stub.Abort(pb.AbortRequest(request_ids=["r", "x"]))).aborted) == ["r"]
        assert (await call.read()).finish_reason == pb.FINISH_REASON_ABORT
        assert await call.read() is grpc.aio.EOF


async def test_model_info(tokenizer):
    async with serving(FakeBackend(lambda _: []), tokenizer) as (_, _, stub):
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model_name, info.max_model_len, info.vocab_size) == ("tiny", 64, len(tokenizer))
    assert list(info.eos_token_ids) == [tokenizer.eos_token_id]


async def test_health_says_not_serving_while_running_calls_are_drained(tokenizer):
    async with serving(FakeBackend(lambda _: [[5], None]), tokenizer) as (running, channel, stub):
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE_NAME):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        call = stub.Generate(pb.GenerateRequest(request_id="r", text="a"))
        await call.read()
        drain = asyncio.create_task(running.drain(grace_s=5))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        call.cancel()
        await asyncio.wait_for(drain, 5)


async def test_reflection_lists_the_service(tokenizer):
    async with serving(FakeBackend(lambda _: []), tokenizer) as (_, channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    assert SERVICE_NAME in [service.name for service in answers[0].list_services_response.service]
