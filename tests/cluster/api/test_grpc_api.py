from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from importlib.metadata import version

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fakes.backend import FakeBackend, fake_logprobs
from outrider.cluster.api.grpc_api import SERVICE_NAME
from outrider.proto import generation_pb2 as pb
from outrider.proto import generation_pb2_grpc
from support.stack import Stack


@asynccontextmanager
async def serving(backend, tokenizer, **options):
    async with Stack(backend, tokenizer=tokenizer, **options).rpc() as rpc:
        yield rpc.running, rpc.channel, generation_pb2_grpc.InferenceStub(rpc.channel)


@pytest.mark.parametrize(
    ("request_", "detail"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[9999])), "token_ids"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(top_p=0.0)), "top_p"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(regex="((")), "regex"),
        (pb.GenerateRequest(text="a", sampling=pb.SamplingParams(choice=pb.TextChoices())), "choice"),
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
        assert field_named_by(raised.value) == detail


def field_named_by(error):
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    assert (status.code, status.message) == (error.code().value[0], error.details())
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    return bad_request.field_violations[0].field


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
        services = ("", SERVICE_NAME, "grpc.reflection.v1alpha.ServerReflection")
        for service in services:
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


async def test_origins_and_log_probabilities_come_with_the_tokens(tokenizer):
    ids = tokenizer.encode("a日b")
    backend = FakeBackend(lambda _: [ids[:2], ids[2:3], ids[3:]])
    sampling = pb.SamplingParams(logprobs=1, prompt_logprobs=1)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6]), sampling=sampling)
    async with serving(backend, tokenizer) as (_, _, stub):
        chunks = [chunk async for chunk in stub.Generate(request)]
        (choice,) = (await stub.GenerateUnary(request)).choices
    names = ["TOKEN_ORIGIN_ACCEPTED", "TOKEN_ORIGIN_BONUS", "TOKEN_ORIGIN_PLAIN", "TOKEN_ORIGIN_PLAIN"]
    assert [pb.TokenOrigin.Name(origin) for origin in choice.token_origins] == names
    assert [origin for chunk in chunks for origin in chunk.token_origins] == list(choice.token_origins)
    assert [id_ for chunk in chunks for id_ in chunk.token_ids] == ids
    expected = [fake_logprobs(id_, 1) for id_ in ids]
    shown = [(entry.token_id, entry.logprob, entry.rank, entry.top[0].token_id) for entry in choice.logprobs]
    assert shown == [(entry.token_id, entry.logprob, entry.rank, entry.top_token_ids[0]) for entry in expected]
    assert [entry for chunk in chunks for entry in chunk.logprobs] == list(choice.logprobs)
    assert [entry.HasField("logprob") for entry in choice.prompt_logprobs] == [False, True]
    assert chunks[0].prompt_logprobs == choice.prompt_logprobs


async def test_server_info_and_loads():
    verifiers: list[dict[str, object]] = [{"running": 2}]
    stack = Stack([], fleet_load=lambda: {"verifiers": verifiers})
    async with stack.rpc() as rpc:
        stub = generation_pb2_grpc.InferenceStub(rpc.channel)
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.version, info.is_draining, info.num_running_requests) == (version("outrider"), False, 0)
        assert not info.HasField("is_batch_invariant")
        load = json_format.MessageToDict((await stub.GetLoads(pb.GetLoadsRequest())).load)
        assert load == {"server_load": 0, "verifiers": [{"running": 2}]}
        verifiers[0]["batch_dependent"] = ()
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).is_batch_invariant
        verifiers.append({"batch_dependent": ("experts",)})
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.is_batch_invariant, info.batch_dependent) == (False, ["experts"])
        stack.gateway.drain()
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).is_draining
