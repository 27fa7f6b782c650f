from __future__ import annotations

import hashlib
import io
import zipfile
from contextlib import asynccontextmanager
from datetime import datetime
from importlib.metadata import version

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc
from transformers import AutoTokenizer

from fakes.backend import FakeBackend, build_gateway, fake_logprobs, says
from outrider.cluster.api import vllm_grpc
from outrider.cluster.api.vllm_grpc import SERVICE_NAME, VllmEngineServicer, scheduler_load
from outrider.cluster.peers.every_gateway import EveryGateway
from outrider.verifier_service.messages.request import (
    FinishReason,
    SpeculationMetrics,
)
from support.stack import Stack

FLEET = {
    "verifiers": [
        {"id": "v0", "state": "draining", "kv_usage": 0.25},
        {"id": "v1", "state": "ready", "kv_usage": 0.75},
    ],
    "totals": {"num_running": 3, "num_waiting": 2, "tokens_per_s": 50.0},
}


@asynccontextmanager
async def serving(played=()):
    stack = played if isinstance(played, Stack) else Stack(played)
    async with stack.rpc() as rpc:
        yield rpc.channel, vllm_engine_pb2_grpc.VllmEngineStub(rpc.channel)


def asks(*ids, stream=True, request_id="r", **sampling):
    tokenized = pb.TokenizedInput(original_text="ignored", input_ids=ids or (5, 6))
    params = pb.SamplingParams(**sampling)
    return pb.GenerateRequest(request_id=request_id, tokenized=tokenized, sampling_params=params, stream=stream)


async def responses(stub, request, metadata=()):
    return [response async for response in stub.Generate(request, metadata=metadata)]


def field_named_by(error):
    status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
    bad_request = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(bad_request)
    return bad_request.field_violations[0].field


async def test_a_stream_is_deltas_and_then_the_whole_choice(tokenizer):
    speculation = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3)
    ids = tokenizer.encode("日本 fox")
    backend = FakeBackend(lambda _: says(tokenizer, "日本 fox"), speculation=speculation)
    async with serving(backend) as (_, stub):
        answers = await responses(stub, asks(5, 6, n=2))
    assert [backend.requests[0].prompt_token_ids, len(backend.requests)] == [(5, 6), 2]
    for index in (0, 1):
        chunks = [answer.chunk for answer in answers if answer.HasField("chunk") and answer.chunk.index == index]
        (complete,) = [a.complete for a in answers if a.HasField("complete") and a.complete.index == index]
        assert len(chunks) > 1
        assert [id_ for chunk in chunks for id_ in chunk.token_ids] == list(complete.output_ids) == ids
        assert all(chunk.completion_tokens == len(chunk.token_ids) for chunk in chunks)
        assert all(chunk.prompt_tokens == 2 for chunk in chunks)
        assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 2, len(ids))
        assert (complete.cached_tokens, chunks[-1].cached_tokens) == (2, 2)
        assert (complete.spec_draft_tokens, complete.spec_accepted_tokens) == (6, 3)
    assert answers[-1].HasField("complete")


async def test_text_is_tokenised(tokenizer):
    backend = FakeBackend(lambda _: [[5]])
    async with serving(backend) as (_, stub):
        await responses(stub, pb.GenerateRequest(text="the fox"))
    assert backend.requests[0].prompt_token_ids == tuple(tokenizer.encode("the fox"))


async def test_what_the_output_is_not_held_to_is_logged_for_want_of_a_field(tokenizer, caplog):
    backend = FakeBackend(lambda _: [[5]])
    async with serving(backend) as (_, stub):
        await responses(stub, asks(json_schema='{"type": "array", "uniqueItems": true}'))
    (record,) = [record for record in caplog.records if record.name == vllm_grpc.__name__]
    assert "json_schema: the answer may break what the grammar lacks and leaves out: uniqueItems" in record.getMessage()


def test_every_field_of_the_protocol_is_read_or_refused():
    sampling = {"stop", "stop_token_ids", "logit_bias", "skip_special_tokens"}
    text_only = {"spaces_between_special_tokens"}
    known = {*vllm_grpc.SAMPLING_FIELDS, *vllm_grpc.UNSUPPORTED_SAMPLING_FIELDS, *sampling, *text_only}
    known |= vllm_grpc.STRUCTURED_FIELDS
    assert {field.name for field in pb.SamplingParams.DESCRIPTOR.fields} == known
    request = {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
    known = request | vllm_grpc.UNSUPPORTED_FIELDS
    assert {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields} == known


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "input"),
        (pb.GenerateRequest(text=""), "text"),
        (pb.GenerateRequest(tokenized=pb.TokenizedInput()), "input_ids"),
        (asks(9999), "input_ids"),
        (asks(logprobs=-1), "logprobs"),
        (asks(prompt_logprobs=-1), "prompt_logprobs"),
        (asks(logit_bias={-1: 1.0}), "logit_bias"),
        (asks(truncate_prompt_tokens=1), "truncate_prompt_tokens"),
        (asks(grammar_from_first_token=True), "grammar_from_first_token"),
        (asks(json_schema='{"type": "nope"}'), "json_schema"),
        (asks(regex="(("), "regex"),
        (asks(grammar="a"), "grammar"),
        (asks(structural_tag="a"), "structural_tag"),
        (asks(choice=pb.ChoiceConstraint()), "choice"),
        (pb.GenerateRequest(text="a", kv_transfer_params=pb.KvTransferParams()), "kv_transfer_params"),
        (pb.GenerateRequest(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json"),
        (pb.GenerateRequest(text="a", mm_inputs=pb.MultimodalInputs()), "mm_inputs"),
        (pb.GenerateRequest(text="a", extra_mm_inputs=[pb.MultimodalInputs()]), "extra_mm_inputs"),
        (pb.GenerateRequest(text="a", media_refs=pb.MediaRefs()), "media_refs"),
        (pb.GenerateRequest(text="a", data_parallel_rank=1), "data_parallel_rank"),
    ],
)
async def test_what_cannot_be_served_is_named(tokenizer, request_, field):
    backend = FakeBackend(lambda _: [[5]])
    async with serving(backend) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await responses(stub, request_)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in raised.value.details()
    assert field_named_by(raised.value) == field
    assert not backend.requests


async def test_speculation_is_switched_off_by_metadata(tokenizer):
    backend = FakeBackend(lambda _: [[5]])
    async with serving(backend) as (_, stub):
        for word in ("True", "false"):
            await responses(stub, asks(), [("x-outrider-disable-spec-decode", word)])
    assert [request.sampling.num_speculative_tokens for request in backend.requests] == [0, None]


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("x-outrider-store", "maybe", "x-outrider-store"),
        ("x-outrider-disable-spec-decode", "maybe", "x-outrider-disable-spec-decode"),
        ("x-outrider-num-speculative-tokens", "few", "x-outrider-num-speculative-tokens"),
        ("x-outrider-num-speculative-tokens", "-1", "num_speculative_tokens"),
        ("x-outrider-priority", "1.5", "x-outrider-priority"),
        ("x-outrider-target-inter-token-ms", "soon", "x-outrider-target-inter-token-ms"),
        ("x-outrider-target-inter-token-ms", "nan", "target_inter_token_ms"),
        ("x-outrider-disable-speculation", "true", "x-outrider-disable-speculation"),
        ("x-outrider-cache-salt-bin", b"\xff", "x-outrider-cache-salt-bin"),
    ],
)
async def test_bad_switches_are_named(tokenizer, key, value, field):
    async with serving([[5]]) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await responses(stub, asks(), [(key, value)])
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field_named_by(raised.value) == field


@pytest.mark.parametrize(
    ("num_top", "rows"),
    [
        (0, []),
        (2, [[6, 5], [7, 6], [8, 7]]),
    ],
)
async def test_log_probabilities_stand_beside_their_tokens(tokenizer, num_top, rows):
    backend = FakeBackend(lambda _: [[5, 6], [7]])
    sampling = {"logprobs": num_top, "prompt_logprobs": num_top}
    async with serving(backend) as (_, stub):
        streamed = await responses(stub, asks(8, 9, **sampling))
        (whole,) = await responses(stub, asks(8, 9, stream=False, **sampling))
    chunks, last, whole = [answer.chunk for answer in streamed[:-1]], streamed[-1].complete, whole.complete
    for output in ([chunk.output_logprobs for chunk in chunks], [whole.output_logprobs]):
        assert [id_ for part in output for id_ in part.token_ids] == [5, 6, 7]
        assert [value for part in output for value in part.token_logprobs] == [-1.5] * 3
        top = [row for part in output for row in part.top_logprobs]
        assert [list(row.token_ids) for row in top] == rows
        assert [list(row.values) for row in top] == [list(fake_logprobs(5, num_top).top_logprobs)] * len(rows)
    for prompt in (chunks[0].input_logprobs, whole.input_logprobs):
        assert list(prompt.token_ids) == [8, 9]
        assert [entry.HasField("value") for entry in prompt.token_logprobs] == [False, True]
        assert prompt.token_logprobs[1].value == -1.5
        assert [list(row.token_ids) for row in prompt.top_logprobs] == ([[], [10, 9]] if num_top else [])
    assert not any(chunk.HasField("input_logprobs") for chunk in chunks[1:])
    assert not last.HasField("output_logprobs"), "it came with the chunks"


@pytest.mark.parametrize(
    ("text", "reason", "sampling", "matched"),
    [
        ("ab=b=", FinishReason.LENGTH, {"stop": ["x", "b="]}, ("matched_stop_str", "b=", "stop")),
        ("ab=b=", FinishReason.LENGTH, {"stop": ["ab=b=c"]}, (None, None, "length")),
        ("ab", FinishReason.STOP, {"stop_token_ids": ["b"]}, ("matched_token_id", "b", "stop")),
        ("ab", FinishReason.STOP, {"stop_token_ids": ["a"]}, (None, None, "stop")),
        ("ab", FinishReason.LENGTH, {"stop_token_ids": ["b"]}, (None, None, "length")),
    ],
)
async def test_what_stopped_a_choice_is_told(tokenizer, text, reason, sampling, matched):
    ids = {char: tokenizer.encode(char)[0] for char in "ab="}
    if "stop_token_ids" in sampling:
        sampling = {"stop_token_ids": [ids[char] for char in sampling["stop_token_ids"]]}
    backend = FakeBackend(lambda _: [[ids[char]] for char in text], finish_reason=reason)
    async with serving(backend) as (_, stub):
        complete = (await responses(stub, asks(**sampling)))[-1].complete
    kind, value, finish_reason = matched
    assert complete.finish_reason == finish_reason
    assert complete.WhichOneof("matched_stop") == kind
    assert kind is None or getattr(complete, kind) == ids.get(value, value)


async def test_special_tokens_count_for_stop_strings_unless_skipped(tokenizer):
    ids = [*tokenizer.encode("a"), tokenizer.convert_tokens_to_ids("<|start|>"), *tokenizer.encode("b")]
    sampling = {"stop": ["<|start|>"]}
    async with serving([[id_] for id_ in ids]) as (_, stub):
        kept = (await responses(stub, asks(**sampling)))[-1].complete
        skipped = (await responses(stub, asks(skip_special_tokens=True, **sampling)))[-1].complete
    assert (kept.finish_reason, list(kept.output_ids)) == ("stop", ids[:2])
    assert (skipped.finish_reason, list(skipped.output_ids)) == ("length", ids)


async def test_abort_ends_a_stream_with_its_reason(tokenizer):
    backend = FakeBackend(lambda _: [[5], None])
    async with serving(backend) as (_, stub):
        call = stub.Generate(asks(request_id="r"))
        await call.read()
        await stub.Abort(pb.AbortRequest(request_ids=["not running", "r"]))
        complete = (await call.read()).complete
        assert (complete.finish_reason, list(complete.output_ids)) == ("abort", [5])
        assert await call.read() is grpc.aio.EOF
    assert backend.cancelled == ["r"]


async def test_health_follows_the_verifiers_and_the_drain(tokenizer):
    fleet = {}
    stack = Stack([], fleet_load=lambda: fleet)
    async with serving(stack) as (_, stub):
        answer = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "no verifier is ready")
        fleet["verifiers"] = [verifier for verifier in FLEET["verifiers"] if verifier["state"] == "draining"]
        assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
        fleet.update(FLEET)
        answer = await stub.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (True, "serving")
        stack.gateway.drain()
        assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_model_info(tokenizer):
    async with serving() as (_, stub):
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.is_generation, info.supports_vision) == ("tiny", True, False)
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (64, 63, len(tokenizer))
    assert list(info.eos_token_ids) == [tokenizer.eos_token_id]


async def test_server_info_counts_what_runs(tokenizer):
    stack = Stack([[5], None])
    async with serving(stack) as (_, stub):
        call = stub.Generate(asks())
        await call.read()
        info = await stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.active_requests, info.is_paused, info.data_parallel_size) == (1, False, 1)
        call.cancel()
        stack.gateway.drain()
        assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused


async def test_server_info_tells_times(tokenizer):
    now_s = 100.0
    every = EveryGateway(build_gateway(FakeBackend(lambda _: [[5]]), tokenizer))
    servicer = VllmEngineServicer(every, lambda: now_s)
    now_s = 130.0
    assert (await servicer.GetServerInfo(pb.GetServerInfoRequest(), None)).last_receive_timestamp == 0
    server = grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await responses(vllm_engine_pb2_grpc.VllmEngineStub(channel), asks())
    await server.stop(None)
    info = await servicer.GetServerInfo(pb.GetServerInfoRequest(), None)
    assert (info.uptime_seconds, info.last_receive_timestamp) == (30.0, 130.0)


async def test_loads_show_the_fleet_as_one_scheduler(tokenizer):
    stack = Stack([], fleet_load=lambda: FLEET)
    async with serving(stack) as (_, stub):
        answer = await stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
        other = await stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    assert (answer.version, answer.dp_rank_count, len(other.loads)) == (version("outrider"), 1, 0)
    assert datetime.fromisoformat(answer.timestamp).tzinfo is not None
    (load,) = answer.loads
    assert (load.dp_rank, load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (0, 3, 2, 5)
    assert (load.token_usage, load.gen_throughput) == (0.5, 50.0)
    assert scheduler_load({"server_load": 0}) == pb.SchedulerLoad(), "before the first snapshot"


async def test_the_tokenizer_comes_as_an_archive(tokenizer, tmp_path):
    async with serving() as (_, stub):
        chunks = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
        again = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
    archive = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [""] * (len(chunks) - 1) + [hashlib.sha256(archive).hexdigest()]
    assert chunks == again
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        assert {info.date_time for info in file.infolist()} == {(1980, 1, 1, 0, 0, 0)}, "no part of the fingerprint"
        file.extractall(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.get_vocab() == tokenizer.get_vocab()
    assert theirs.chat_template == tokenizer.chat_template


def test_a_large_archive_is_cut(tokenizer):
    archive = bytes(2 * vllm_grpc.TOKENIZER_CHUNK_BYTES + 1)
    chunks = list(vllm_grpc.tokenizer_chunks(archive))
    assert b"".join(chunk.data for chunk in chunks) == archive
    assert [len(chunk.data) for chunk in chunks] == [*[vllm_grpc.TOKENIZER_CHUNK_BYTES] * 2, 1]
    assert [bool(chunk.sha256) for chunk in chunks] == [False, False, True]


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        ("Embed", pb.EmbedRequest()),
        ("FlushCache", common.FlushCacheRequest()),
        ("StartProfile", common.StartProfileRequest()),
        ("StopProfile", common.StopProfileRequest()),
        ("SubscribeKvEvents", common.SubscribeKvEventsRequest()),
    ],
)
async def test_what_is_not_there_says_so(tokenizer, call, request_):
    async with serving() as (_, stub):
        answer = getattr(stub, call)(request_)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await (answer.read() if call == "SubscribeKvEvents" else answer)
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert raised.value.details() not in ("", "Method not implemented!")


def test_every_call_of_the_protocol_is_served():
    methods = pb.DESCRIPTOR.services_by_name["VllmEngine"].methods
    assert {method.name for method in methods} <= vars(VllmEngineServicer).keys()


async def test_reflection_and_health_know_the_service(tokenizer):
    async with serving() as (channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
        ]
        listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
    assert SERVICE_NAME == "vllm.grpc.engine.VllmEngine"
    assert SERVICE_NAME in [service.name for service in listed.list_services_response.service]
    assert described.file_descriptor_response.file_descriptor_proto
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
