"""The gateways' door to a verifier: a real gRPC server in front of an engine that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from fakes.engine_bench import make_request
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.engine.service import GatewayStream, RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_rules import NO_ORDERS, ControlRules
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import (
    CONTROLS,
    AskState,
    BadRequest,
    Cancel,
    Control,
    ControlResult,
    EngineLoad,
    Published,
    RequestLoad,
    UpdateDraftWeights,
    UpdateWeights,
    read_frame,
)
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, payloads_of
from outrider.verifier_service.messages.request import FinishReason, RequestOutput, SpeculationMetrics
from outrider.verifier_service.messages.requests_link import TO_GATEWAY, Accepted, Refused, StepOutputs
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import until

FOR_TRAINERS = ControlRules(is_open=True)


class ScriptedEngine:
    """Records what the table sends; refuses everything once it is dead."""

    def __init__(self, **options: Any) -> None:
        self.received: list[Any] = []
        self.is_dead = False
        self.table, self.control = RequestTable(self._send, **options), ControlTable(self._send)

    def _send(self, message: bytes | Cancel | Control) -> None:
        if self.is_dead:
            raise ConnectionError("the engine is gone")
        read = read_frame(message) if isinstance(message, bytes) else message
        self.received.append(read)
        if isinstance(read, BadRequest):
            self.say(RequestOutput.failed(read.request_id, read.error))

    def say(self, *outputs: RequestOutput) -> None:
        """Say a step's outputs."""
        self.table.deliver([Published.of(output) for output in outputs])


@contextlib.asynccontextmanager
async def served(engine: ScriptedEngine, rules: ControlRules = NO_ORDERS) -> AsyncIterator[Any]:
    """Serve the engine's tables; yields a stub."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    servicer = VerifierLinkServicer(engine.table, engine.control, rules=rules)
    link_pb2_grpc.add_VerifierLinkServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        yield link_pb2_grpc.VerifierLinkStub(channel)
    await server.stop(grace=None)


class Gateway:
    """A gateway's end of its stream, which hears message by message."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self._heard: list[Any] = []

    async def say(self, *messages: Any) -> None:
        payloads = [message if isinstance(message, bytes) else encode(message) for message in messages]
        await self.call.write(link_pb2.Frame(sender="g", payload=payloads[0], more=payloads[1:]))

    async def hear(self) -> Any:
        while not self._heard:
            frame = await self.call.read()
            if frame is grpc.aio.EOF:
                return None
            self._heard += [decode(payload, TO_GATEWAY) for payload in payloads_of(frame)]
        return self._heard.pop(0)


@contextlib.asynccontextmanager
async def gateway_at(engine: ScriptedEngine) -> AsyncIterator[Gateway]:
    async with served(engine) as stub:
        yield Gateway(stub.Serve(timeout=20))


def told(stream: GatewayStream) -> list[Any]:
    """Return what a stream that is not served was told."""
    return [decode(payload, TO_GATEWAY) for payload in stream._outbox._waiting]


def step(*outputs: RequestOutput) -> StepOutputs:
    return StepOutputs(outputs=outputs)


def output(request_id: str, *token_ids: int, end: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(request_id=request_id, token_ids=token_ids, finish_reason=end)


# --- the table alone ---


async def test_a_steps_outputs_reach_their_own_gateways_in_one_message_each():
    engine = ScriptedEngine()
    first, second = GatewayStream(), GatewayStream()
    for stream, name in ((first, "a"), (first, "b"), (second, "c")):
        engine.table.take(stream, encode(make_request(name)))
    engine.say(output("a", 1, 2), output("c", 7), output("b", 3))
    engine.say(output("a", 4, end=FinishReason.STOP), output("c", 8, end=FinishReason.LENGTH))
    assert told(first) == [
        Accepted(request_id="a", num_taken=1),
        Accepted(request_id="b", num_taken=2),
        step(output("a", 1, 2), output("b", 3)),
        step(output("a", 4, end=FinishReason.STOP)),
    ]
    assert told(second)[1:] == [step(output("c", 7)), step(output("c", 8, end=FinishReason.LENGTH))]
    assert [type(message).__name__ for message in engine.received] == ["GenerationRequest"] * 3
    assert len(engine.table) == 1


async def test_a_finished_request_is_not_cancelled_with_its_stream():
    engine, stream = ScriptedEngine(), GatewayStream()
    for name in "ab":
        engine.table.take(stream, encode(make_request(name)))
    engine.say(output("a", 1, end=FinishReason.STOP))
    engine.table.close(stream)
    assert engine.received[2:] == [Cancel(request_id="b")]
    assert len(engine.table) == 0


async def test_a_cancelled_request_is_cancelled_once_and_heard_no_more():
    engine, stream = ScriptedEngine(), GatewayStream()
    for message in (make_request("a"), Cancel(request_id="a"), Cancel(request_id="a")):
        engine.table.take(stream, encode(message))
    engine.say(output("a", 1))
    assert engine.received == [make_request("a"), Cancel(request_id="a")]
    assert told(stream) == [Accepted(request_id="a", num_taken=1)]
    assert len(engine.table) == 0


async def test_no_gateway_cancels_anothers_request():
    engine, stream = ScriptedEngine(), GatewayStream()
    engine.table.take(stream, encode(make_request("a")))
    engine.table.take(GatewayStream(), encode(Cancel(request_id="a")))
    assert engine.received == [make_request("a")]


async def test_a_requests_bytes_pass_unopened():
    sent: list[bytes | Cancel] = []
    payload = encode(make_request("a"))
    RequestTable(sent.append).take(GatewayStream(), payload)
    assert sent[0] is payload


async def test_a_duplicate_id_is_refused_and_the_first_request_goes_on():
    engine, stream, other = ScriptedEngine(), GatewayStream(), GatewayStream()
    engine.table.take(stream, encode(make_request("a")))
    engine.table.take(other, encode(make_request("a", prompt=(1,))))
    (refusal,) = told(other)
    assert (refusal.request_id, refusal.is_lost) == ("a", False)
    assert "request_id" in refusal.error
    engine.table.close(other)
    assert engine.received == [make_request("a")], "neither a second request nor a Cancel of the first"
    engine.say(output("a", 8, end=FinishReason.STOP))
    assert told(stream)[-1] == step(output("a", 8, end=FinishReason.STOP))
    engine.table.take(other, encode(make_request("a")))
    assert told(other)[-1] == Accepted(request_id="a", num_taken=2)


@pytest.mark.parametrize(
    ("field", "spoilt", "named"),
    [(b"max_tokens\x4d", b"max_tokens\x00", "max_tokens"), (b"prompt_", b"prompT_", "prompt_token_ids")],
    ids=["bad value", "missing field"],
)
async def test_a_request_that_the_engine_cannot_read_ends_with_its_error(field: bytes, spoilt: bytes, named: str):
    engine, stream = ScriptedEngine(), GatewayStream()
    engine.table.take(stream, encode(make_request("a", max_tokens=77)).replace(field, spoilt))
    ended = {
        message.outputs[0].finish_reason: message.outputs[0] for message in told(stream) if type(message) is StepOutputs
    }
    assert named in ended[FinishReason.ERROR].error
    assert [type(message) for message in engine.received] == [BadRequest], "there is nothing to cancel"
    assert len(engine.table) == 0


# --- what a load does not include yet, and the queue ---


def load_with(*request_ids: str, num_waiting: int = 0) -> EngineLoad:
    """Return an engine's load with these requests, of which so many wait."""
    num_running = len(request_ids) - num_waiting
    requests = tuple(
        RequestLoad(
            request_id=name,
            is_running=place < num_running,
            drafter_id=None,
            draft_length=0,
            num_speculative_tokens=None,
        )
        for place, name in enumerate(request_ids)
    )
    return EngineLoad(
        num_running=num_running, num_waiting=num_waiting, num_decoding=num_running, kv_usage=0.0, requests=requests
    )


def test_requests_that_a_load_does_not_include_yet_are_pending():
    engine, stream = ScriptedEngine(), GatewayStream()
    for name in "abc":
        engine.table.take(stream, encode(make_request(name)))
    assert (engine.table.num_taken, engine.table.num_pending) == (3, 3)
    engine.table.hear(load_with("a"))  # made before the others came
    assert engine.table.num_pending == 2
    engine.table.take(stream, encode(Cancel(request_id="b")))
    assert engine.table.num_pending == 1, "what has ended is no load"
    engine.table.take(stream, encode(make_request("d")))
    engine.table.hear(load_with("a", "c"))
    assert engine.table.num_pending == 1
    engine.table.hear(load_with("a", "c"))  # whatever it is, the engine had it for a whole load
    assert (engine.table.num_taken, engine.table.num_pending) == (4, 0)


def test_a_request_that_does_not_wait_is_taken_while_there_is_room():
    engine, stream = ScriptedEngine(max_running=2), GatewayStream()
    for name in "abc":
        engine.table.take(stream, encode(dataclasses.replace(make_request(name), most_waiting=0)))
    *taken, refused = told(stream)
    assert [message.request_id for message in taken] == ["a", "b"]
    assert (refused.request_id, refused.is_full) == ("c", True)
    engine.table.hear(load_with("a", "b"))
    engine.say(output("a", 1, end=FinishReason.STOP))
    engine.table.take(stream, encode(dataclasses.replace(make_request("d"), most_waiting=0)))
    assert told(stream)[-1] == Accepted(request_id="d", num_taken=3), "one has ended since the load"


def test_where_some_wait_there_is_room_for_as_many_as_run():
    engine, stream = ScriptedEngine(max_running=9), GatewayStream()
    for name in "ab":
        engine.table.take(stream, encode(make_request(name)))
    engine.table.hear(load_with("a", "b", num_waiting=1))  # its KV is full
    engine.table.take(stream, encode(dataclasses.replace(make_request("c"), most_waiting=1)))
    assert told(stream)[-1].is_full


def test_two_gateways_do_not_both_take_the_last_place():
    engine, streams = ScriptedEngine(), {name: GatewayStream() for name in "abc"}
    engine.table.take(streams["a"], encode(make_request("running")))
    engine.table.take(streams["a"], encode(make_request("waits")))
    engine.table.hear(load_with("running", "waits", num_waiting=1))
    for name in "bc":  # both know of one that waits, and two may
        message = dataclasses.replace(make_request(name), most_waiting=2)
        engine.table.take(streams[name], encode(message))
    assert told(streams["b"]) == [Accepted(request_id="b", num_taken=3)]
    (refused,) = told(streams["c"])
    assert (refused.is_full, refused.is_lost) == (True, True)
    assert refused.error == "3 requests would wait here, 2 may"
    assert [message.request_id for message in engine.received] == ["running", "waits", "b"]
    engine.table.take(streams["c"], encode(make_request("admitted before")))
    assert told(streams["c"])[-1] == Accepted(request_id="admitted before", num_taken=4)


# --- over gRPC ---


async def test_a_stream_brings_outputs_as_the_engine_says_them():
    engine = ScriptedEngine()
    request = make_request("a", seed=3, max_tokens=5)
    last = RequestOutput(
        request_id="a",
        token_ids=(7,),
        num_cached_tokens=4,
        finish_reason=FinishReason.LENGTH,
        speculation=SpeculationMetrics(enabled=True, num_drafts=2, num_accepted_per_position=[2, 1]),
    )
    async with gateway_at(engine) as gateway:
        await gateway.say(request, make_request("b"))
        assert [await gateway.hear() for _ in range(2)] == [
            Accepted(request_id="a", num_taken=1),
            Accepted(request_id="b", num_taken=2),
        ]
        assert engine.received == [request, make_request("b")]
        engine.say(output("a", 1, 2), output("b", 3))
        assert await gateway.hear() == step(output("a", 1, 2), output("b", 3))
        engine.say(last)
        assert await gateway.hear() == step(last)
        await gateway.say(Cancel(request_id="b"))
        await until(lambda: len(engine.table) == 0)
        assert engine.received[2:] == [Cancel(request_id="b")]


@pytest.mark.parametrize("how", ["cancelled", "half-closed"])
async def test_the_streams_end_cancels_its_requests(how: str):
    engine = ScriptedEngine()
    async with gateway_at(engine) as gateway:
        await gateway.say(make_request("a"))
        await gateway.hear()
        engine.say(output("a", 1))
        await gateway.hear()
        if how == "cancelled":
            gateway.call.cancel()
        else:
            await gateway.call.done_writing()
            assert await gateway.hear() is None
        await until(lambda: len(engine.received) == 2)
        assert engine.received[-1] == Cancel(request_id="a")
        assert len(engine.table) == 0


async def test_a_lost_engine_is_told_to_running_and_to_new_requests():
    engine = ScriptedEngine()
    async with gateway_at(engine) as gateway:
        await gateway.say(make_request("a"))
        await gateway.hear()
        engine.is_dead = True
        engine.table.fail("rank 0 was killed")
        assert await gateway.hear() == Refused(request_id="a", error="rank 0 was killed", is_lost=True)
        await gateway.say(make_request("b"))
        assert await gateway.hear() == Refused(request_id="b", error="the engine is gone", is_lost=True)


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (b"", ""),
        (b"\xc1", "MessagePack"),
        (encode(Accepted(request_id="a")), "Accepted"),
        (encode(make_request("a")).replace(b"request_id", b"rEquest_id"), "request_id"),
    ],
    ids=["empty", "no msgpack", "another message", "no id"],
)
async def test_a_message_that_is_neither_request_nor_cancel_ends_the_stream(payload: bytes, named: str):
    engine = ScriptedEngine()
    async with gateway_at(engine) as gateway:
        await gateway.say(make_request("b"), payload)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await gateway.hear() is not None:
                pass
        assert await gateway.call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in await gateway.call.details()
        await until(lambda: engine.received == [make_request("b"), Cancel(request_id="b")])


# --- control ---


@contextlib.asynccontextmanager
async def controlling(
    engine: ScriptedEngine, rules: ControlRules = FOR_TRAINERS
) -> AsyncIterator[Callable[[bytes], Any]]:
    async with served(engine, rules) as stub:
        yield lambda payload: stub.Control(link_pb2.Frame(payload=payload), timeout=20)


async def test_a_control_call_reaches_the_engine_and_its_result_the_caller():
    engine = ScriptedEngine()
    async with controlling(engine) as control:
        answer = asyncio.ensure_future(_answered(control(encode(AskState(call_id="c")))))
        await until(lambda: engine.received == [AskState(call_id="c")])
        result = ControlResult(call_id="c", weight_version="7", is_paused=True)
        engine.control.deliver([ControlResult(call_id="other"), result])
        assert decode((await answer).payload, (ControlResult,)) == result


@pytest.mark.parametrize("payload", [b"", b"garbage", encode(Cancel(request_id="r")), encode(make_request("r"))])
async def test_what_is_no_control_message_is_refused_and_the_engine_never_hears_of_it(payload: bytes):
    engine = ScriptedEngine()
    async with controlling(engine) as control:
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await control(payload)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert engine.received == []


async def test_where_no_trainer_is_served_no_control_call_reaches_the_engine():
    engine = ScriptedEngine()
    async with controlling(engine, NO_ORDERS) as control:
        for kind in CONTROLS:
            needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
            values = {name: 1 if name in ("master_port", "rank_offset", "world_size") else "x" for name in needed}
            with pytest.raises(grpc.aio.AioRpcError, match="not for rollouts") as failure:
                await control(encode(kind(**values)))
            assert failure.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert engine.received == []


async def test_a_folder_of_weights_lies_below_the_root_with_all_its_links(tmp_path: Path):
    root, inside, linked = tmp_path / "root", tmp_path / "root" / "a", tmp_path / "root" / "linked"
    for folder in (inside, linked, tmp_path / "other", tmp_path / "rooted"):
        folder.mkdir(parents=True)
    (inside / "model.safetensors").symlink_to(root / "shared.safetensors")
    (linked / "model.safetensors").symlink_to("/etc/passwd")
    (root / "out").symlink_to(tmp_path / "other")
    engine = ScriptedEngine()
    async with controlling(engine, ControlRules(is_open=True, weights_root=str(root))) as control:
        for folder in (tmp_path / "other", tmp_path / "rooted", root / "out", linked, inside / ".." / ".." / "other"):
            for kind in (UpdateWeights, UpdateDraftWeights):
                with pytest.raises(grpc.aio.AioRpcError, match="model_path: ") as failure:
                    await control(encode(kind(call_id="u", folder=str(folder))))
                assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert engine.received == []
        welcome = UpdateWeights(call_id="u", folder=str(inside)), UpdateWeights(call_id="g", names=("w",))
        for number, message in enumerate(welcome, start=1):
            answer = asyncio.ensure_future(_answered(control(encode(message))))
            await until(lambda number=number: len(engine.received) == number)
            engine.control.deliver([ControlResult(call_id=message.call_id)])
            await answer
            assert engine.received[-1] == message


async def test_a_control_call_ends_with_the_engine():
    engine = ScriptedEngine()
    async with controlling(engine) as control:
        answer = asyncio.ensure_future(_answered(control(encode(AskState(call_id="c")))))
        await until(lambda: engine.received)
        engine.control.fail("killed")
        with pytest.raises(grpc.aio.AioRpcError, match="killed") as failure:
            await answer
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        engine.is_dead = True
        with pytest.raises(grpc.aio.AioRpcError, match="the engine is gone"):
            await control(encode(AskState(call_id="d")))


async def _answered(call: Any) -> Any:
    return await call
