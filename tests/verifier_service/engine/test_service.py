"""The gateways' door to a verifier: a real gRPC server in front of an engine that the test plays."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from fakes.engine_bench import make_request
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.engine.service import EngineLostError, RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import AskState, BadRequest, Cancel, Control, ControlResult, read_frame
from outrider.verifier_service.messages.link import ACCEPTED, CHANNEL_OPTIONS
from outrider.verifier_service.messages.request import FinishReason, RequestOutput, SpeculationMetrics
from outrider.verifier_service.messages.wire import decode, encode


class ScriptedEngine:
    """Records what the table sends; refuses everything once it is dead."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.is_dead = False
        self.table, self.control = RequestTable(self._send), ControlTable(self._send)

    def _send(self, message: bytes | Cancel | Control) -> None:
        if self.is_dead:
            raise ConnectionError("the engine is gone")
        read = read_frame(message) if isinstance(message, bytes) else message
        self.received.append(read)
        if isinstance(read, BadRequest):
            self.table.deliver([RequestOutput.failed(read.request_id, read.error)])

    def say(self, request_id: str, *token_ids: int, end: FinishReason | None = None) -> None:
        self.table.deliver([RequestOutput(request_id=request_id, token_ids=token_ids, finish_reason=end)])


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def served(engine: ScriptedEngine) -> AsyncIterator[Any]:
    """Serve the engine's tables; yields a stub."""
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    link_pb2_grpc.add_VerifierLinkServicer_to_server(VerifierLinkServicer(engine.table, engine.control), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel:
        yield link_pb2_grpc.VerifierLinkStub(channel)
    await server.stop(grace=None)


@contextlib.asynccontextmanager
async def calling(engine: ScriptedEngine) -> AsyncIterator[Callable[[Any], Any]]:
    """Yield a function from a request, or raw bytes, to the call."""
    async with served(engine) as stub:

        def call(message: Any) -> Any:
            payload = message if isinstance(message, bytes) else encode(message)
            return stub.Generate(link_pb2.Frame(sender="g", payload=payload), timeout=20)

        yield call


async def begin(engine: ScriptedEngine, request_id: str) -> Any:
    """Start a request's stream at the table; return it once the engine has the request."""
    stream = engine.table.stream(encode(make_request(request_id)))
    assert await anext(stream) is None
    return stream


async def hear(call: Any) -> RequestOutput:
    """Return a call's next output."""
    while (payload := (await call.read()).payload) == ACCEPTED:
        pass
    return decode(payload, (RequestOutput,))


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read a call to its end; return how it ended."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


# --- the table alone ---


async def test_outputs_reach_their_own_callers_in_order():
    engine = ScriptedEngine()
    streams = {name: await begin(engine, name) for name in "ab"}
    heard: dict[str, list[int]] = {"a": [], "b": []}

    async def listen(name: str) -> None:
        async for output in streams[name]:
            heard[name].extend(output.token_ids)

    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        for name in streams:
            tasks.create_task(listen(name))
        engine.say("a", 1, 2)
        engine.say("b", 3)
        engine.say("a", 4, end=FinishReason.STOP)
        engine.say("b", 5, end=FinishReason.LENGTH)
    assert heard == {"a": [1, 2, 4], "b": [3, 5]}
    assert [type(message).__name__ for message in engine.received] == ["GenerationRequest"] * 2
    assert len(engine.table) == 0


async def test_a_finished_request_is_not_cancelled_when_its_stream_is_closed_early():
    engine = ScriptedEngine()
    stream = await begin(engine, "a")
    engine.say("a", 1, end=FinishReason.STOP)
    assert (await anext(stream)).token_ids == (1,)
    await stream.aclose()
    assert engine.received == [make_request("a")]


async def test_leaving_early_cancels_once():
    engine = ScriptedEngine()
    stream = await begin(engine, "a")
    engine.say("a", 1)
    await anext(stream)
    await stream.aclose()
    assert engine.received == [make_request("a"), Cancel(request_id="a")]
    engine.say("a", 2)  # its caller has left
    assert len(engine.table) == 0


async def test_a_table_whose_engine_is_lost_tells_every_caller():
    engine = ScriptedEngine()
    streams = [await begin(engine, name) for name in "ab"]
    waiting = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await settle()
    engine.is_dead = True
    engine.table.fail("killed")
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, EngineLostError)
        assert str(result) == "killed"
    assert len(engine.table) == 0
    assert not any(isinstance(message, Cancel) for message in engine.received)


async def test_a_request_that_cannot_be_handed_over_is_forgotten():
    engine = ScriptedEngine()
    engine.is_dead = True
    with pytest.raises(ConnectionError, match="gone"):
        await anext(engine.table.stream(encode(make_request("a"))))
    assert len(engine.table) == 0


# --- over gRPC ---


async def test_a_call_streams_outputs_as_the_engine_says_them():
    engine = ScriptedEngine()
    request = make_request("a", seed=3, max_tokens=5)
    last = RequestOutput(
        request_id="a",
        token_ids=(7,),
        num_cached_tokens=4,
        finish_reason=FinishReason.LENGTH,
        speculation=SpeculationMetrics(enabled=True, num_drafts=2, num_accepted_per_position=[2, 1]),
    )
    async with calling(engine) as call:
        stream = call(request)
        await until(lambda: engine.received)
        assert engine.received == [request]
        engine.say("a", 1, 2)
        assert (await hear(stream)).token_ids == (1, 2)
        engine.table.deliver([last])
        assert await hear(stream) == last
        assert await stream.read() is grpc.aio.EOF
        assert await stream.code() is grpc.StatusCode.OK
        assert engine.received == [request]


async def test_a_call_is_told_when_the_engine_has_its_request_and_only_then():
    engine = ScriptedEngine()
    async with calling(engine) as call:
        stream = call(make_request("a"))
        assert (await stream.read()).payload == ACCEPTED
        assert engine.received == [make_request("a")]
        engine.is_dead = True
        for refused in (make_request("b"), b"no request"):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(refused).read()


@pytest.mark.parametrize("num_heard", [0, 1])
async def test_cancelling_the_call_cancels_the_request(num_heard: int):
    engine = ScriptedEngine()
    async with calling(engine) as call:
        stream = call(make_request("a"))
        await until(lambda: engine.received)
        for _ in range(num_heard):
            engine.say("a", 1)
            await hear(stream)
        stream.cancel()
        await until(lambda: len(engine.received) == 2)
        assert engine.received[-1] == Cancel(request_id="a")
        assert len(engine.table) == 0


async def test_a_caller_that_goes_away_with_its_channel_cancels_too():
    engine = ScriptedEngine()
    async with calling(engine) as call:
        call(make_request("a"))
        await until(lambda: engine.received)
    await until(lambda: Cancel(request_id="a") in engine.received)


async def test_closing_a_paused_generator_cancels_without_waiting_for_the_collector():
    """As grpc leaves it when a call is cancelled while an output is being written."""
    engine = ScriptedEngine()
    frame = link_pb2.Frame(payload=encode(make_request("a")))
    answers = VerifierLinkServicer(engine.table, engine.control).Generate(frame, context=None)
    assert (await anext(answers)).payload == ACCEPTED
    await answers.aclose()
    await settle()
    assert engine.received[-1] == Cancel(request_id="a")


async def test_a_lost_engine_is_unavailable_to_running_and_to_new_calls():
    engine = ScriptedEngine()
    async with calling(engine) as call:
        running = call(make_request("a"))
        await until(lambda: engine.received)
        engine.say("a", 1)
        assert (await hear(running)).token_ids == (1,)
        engine.is_dead = True
        engine.table.fail("rank 0 was killed")
        assert await status_of(running) == (grpc.StatusCode.UNAVAILABLE, "rank 0 was killed")
        assert await status_of(call(make_request("b"))) == (grpc.StatusCode.UNAVAILABLE, "the engine is gone")
        assert len(engine.table) == 0


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (b"", ""),
        (b"\xc1", "MessagePack"),
        (encode(Cancel(request_id="a")), "Cancel"),
        (encode(make_request("a")).replace(b"request_id", b"rEquest_id"), "request_id"),
    ],
    ids=["empty", "no msgpack", "another message", "no id"],
)
async def test_a_frame_that_is_no_request_is_an_invalid_argument(payload: bytes, named: str):
    engine = ScriptedEngine()
    async with calling(engine) as call:
        code, details = await status_of(call(payload))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details
        assert named in details
        assert engine.received == []


@pytest.mark.parametrize(
    ("field", "spoilt", "named"),
    [(b"max_tokens\x4d", b"max_tokens\x00", "max_tokens"), (b"prompt_", b"prompT_", "prompt_token_ids")],
    ids=["bad value", "missing field"],
)
async def test_a_request_that_the_engine_cannot_read_is_an_invalid_argument(field: bytes, spoilt: bytes, named: str):
    engine = ScriptedEngine()
    async with calling(engine) as call:
        code, details = await status_of(call(encode(make_request("a", max_tokens=77)).replace(field, spoilt)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert named in details
        assert [type(message) for message in engine.received] == [BadRequest], "there is nothing to cancel"
        assert len(engine.table) == 0


async def test_a_requests_bytes_pass_unopened():
    sent: list[bytes | Cancel] = []
    frame = encode(make_request("a"))
    stream = RequestTable(sent.append).stream(frame)
    assert await anext(stream) is None
    assert sent[0] is frame
    await stream.aclose()


async def test_a_duplicate_id_is_refused_and_the_first_call_goes_on():
    engine = ScriptedEngine()
    async with calling(engine) as call:
        first = call(make_request("a"))
        await until(lambda: engine.received)
        code, details = await status_of(call(make_request("a", prompt=(1,))))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "request_id" in details
        assert engine.received == [make_request("a")], "neither a second request nor a Cancel of the first"
        engine.say("a", 8, end=FinishReason.STOP)
        assert (await hear(first)).token_ids == (8,)
        again = call(make_request("a"))
        await until(lambda: len(engine.received) == 2)
        engine.say("a", 9, end=FinishReason.STOP)
        assert (await hear(again)).token_ids == (9,)


async def test_a_request_that_the_engine_refuses_is_an_invalid_argument():
    engine = ScriptedEngine()
    async with calling(engine) as call:
        stream = call(make_request("a"))
        await until(lambda: engine.received)
        failure = RequestOutput(request_id="a", token_ids=(), finish_reason=FinishReason.ERROR, error="too long")
        engine.table.deliver([failure])
        assert await status_of(stream) == (grpc.StatusCode.INVALID_ARGUMENT, "too long")
        assert engine.received == [make_request("a")], "there is nothing to cancel"
        assert len(engine.table) == 0


# --- control ---


@contextlib.asynccontextmanager
async def controlling(engine: ScriptedEngine) -> AsyncIterator[Callable[[bytes], Any]]:
    async with served(engine) as stub:
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
