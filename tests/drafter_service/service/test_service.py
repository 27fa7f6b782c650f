from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.in_process_port import InProcessPort
from fakes.runner import FakeRunner, confidence, continuation
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.service import (
    DrafterLinkServicer,
    EngineDeadError,
    LinkServiceConfig,
)
from outrider.proto.link_pb2 import Frame
from outrider.proto.link_pb2_grpc import DrafterLinkStub, add_DrafterLinkServicer_to_server
from outrider.verifier_service.links.control_rules import NO_ORDERS, ControlRules
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, Open, Resync
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import Control, ControlResult, UpdateDraftWeights
from outrider.verifier_service.messages.link import (
    CHANNEL_OPTIONS,
    DrafterIdentity,
    Hello,
    Ping,
    Pong,
    Refuse,
    Welcome,
    frame_of,
    peek_request_ids,
    peek_type,
    refusal_reason,
    vocab_fingerprint,
)
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import until
from tiny.drafters import model_drafter

IDENTITY = DrafterIdentity(drafter_id="d", vocab_size=97, vocab_fingerprint="abc", max_draft_length=8, max_model_len=64)
HELLO = Hello(verifier_id="v", epoch=3, vocab_size=97, vocab_fingerprint="abc")
OPEN = Open(request_id="r", sampling=DraftSampling(temperature=0.0), token_ids=(1, 2))
COMMIT = Commit(request_id="r", round_id=9, position=2, token_ids=(), max_length=3)
ANSWERS = (Welcome, Refuse, Draft, Resync, Pong)


class RecordingPort:
    """A port without an engine: keeps what it is given, answers nothing, can be declared dead."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, bytes]] = []
        self.gone: list[str] = []
        self.deliver: dict[str, Callable[[bytes], None]] = {}
        self.is_dead = False

    def submit(self, peer: str, payload: bytes) -> None:
        self.submitted.append((peer, payload))

    def peer_gone(self, peer: str) -> None:
        self.gone.append(peer)
        if self.is_dead:
            raise EngineDeadError("gone")

    def subscribe(self, peer: str, deliver: Callable[[bytes], None]) -> None:
        self.deliver[peer] = deliver

    def unsubscribe(self, peer: str) -> None:
        del self.deliver[peer]

    def load(self) -> DrafterLoad:
        if self.is_dead:
            raise EngineDeadError("the engine has ended")
        return DrafterLoad(num_sessions=1, queue_depth=2, mean_draft_s=0.25)

    async def control(self, message: Control) -> ControlResult:
        if self.is_dead:
            raise ConnectionError("the engine has ended")
        if message.call_id == "twice":
            raise ValueError("call_id: 'twice' is not answered yet")
        return ControlResult(call_id=message.call_id, weight_version=f"now {message.weight_version}")


@contextlib.asynccontextmanager
async def serving(
    port: Any, config: LinkServiceConfig | None = None, rules: ControlRules = NO_ORDERS
) -> AsyncIterator[tuple[DrafterLinkServicer, str]]:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    servicer = DrafterLinkServicer(port, IDENTITY, config, rules)
    add_DrafterLinkServicer_to_server(servicer, server)
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{number}"
    finally:
        await server.stop(grace=None)


class Caller:
    """A verifier's raw stream."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, message: Any, *, sender: str = "v", epoch: int = 3) -> None:
        payload = message if isinstance(message, bytes) else encode(message)
        await self.call.write(frame_of(sender, epoch, payload))

    async def hear(self) -> Any:
        frame = await asyncio.wait_for(self.call.read(), 5)
        if frame is grpc.aio.EOF:
            return grpc.aio.EOF
        assert (frame.sender, frame.epoch) == ("v", 3)
        return decode(frame.payload, ANSWERS)

    async def ended(self) -> tuple[grpc.StatusCode, str]:
        return await asyncio.wait_for(self.call.code(), 5), await self.call.details()


@contextlib.asynccontextmanager
async def calling(address: str, hello: Any = HELLO, **frame: Any) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        caller = Caller(DrafterLinkStub(channel).Stream())
        if hello is not None:
            await caller.say(hello, **frame)
        yield caller


async def read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@contextlib.contextmanager
def running_engine(runner: FakeRunner):
    drafter = model_drafter(runner, torch.Generator().manual_seed(0))
    port = InProcessPort(DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig()), idle_s=0.05)
    try:
        yield port
    finally:
        port.stop()


async def test_handshake_draft_and_resync_over_a_socket():
    runner = FakeRunner()
    with running_engine(runner) as port:
        async with serving(port) as (_, address), calling(address) as caller:
            assert await caller.hear() == IDENTITY.welcome()
            await caller.say(COMMIT)
            assert await caller.hear() == Resync(request_id="r")
            await caller.say(OPEN)
            await caller.say(COMMIT)
            expected = continuation([1, 2], 3, runner.vocab_size)
            sure = (confidence(runner.vocab_size),) * 3
            draft = Draft(request_id="r", round_id=9, position=2, token_ids=expected, confidences=sure)
            assert await caller.hear() == draft


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (Hello(protocol_version=99, verifier_id="v", epoch=3, vocab_size=97), "protocol version 99"),
        (Hello(verifier_id="v", epoch=3, vocab_size=97, vocab_fingerprint="other"), "vocabularies differ"),
        (Hello(verifier_id="v", epoch=3, vocab_size=98), "has 97 tokens"),
        (Ping(sent_s=0.0, sequence=0), "must be Hello"),
        (b"\xc1garbage", "must be Hello"),
        (Hello(verifier_id="w", epoch=3, vocab_size=97), "names another verifier"),
    ],
)
async def test_handshakes_that_do_not_fit_are_refused_with_the_reason(hello: Any, reason: str):
    async with serving(RecordingPort()) as (servicer, address), calling(address, hello) as caller:
        answer = await caller.hear()
        assert isinstance(answer, Refuse)
        assert reason in answer.reason
        code, details = await caller.ended()
        assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, answer.reason)
        assert servicer.counters.num_refused == 1


async def test_a_silent_stream_is_refused():
    config = LinkServiceConfig(hello_timeout_s=0.05)
    async with serving(RecordingPort(), config) as (_, address), calling(address, None) as caller:
        assert (await caller.ended())[1] == "no Hello within 0.05 s"


@pytest.mark.parametrize(
    ("vocab_size", "fingerprint", "fits"),
    [(90, "", True), (97, "", True), (98, "", False), (200, "abc", True), (90, "other", False)],
)
def test_vocabularies_fit_by_fingerprint_or_else_by_size(vocab_size: int, fingerprint: str, fits: bool):
    hello = Hello(verifier_id="v", epoch=1, vocab_size=vocab_size, vocab_fingerprint=fingerprint)
    assert (refusal_reason(hello, IDENTITY) is None) is fits


def test_fingerprints_tell_vocabularies_apart_and_ignore_their_order():
    assert vocab_fingerprint({"a": 0, "b": 1}) == vocab_fingerprint({"b": 1, "a": 0})
    different = [{"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0}, {"ab": 0}, {"a": 0, "b": 2}, {"\ud800": 0}, {}]
    assert len({vocab_fingerprint(vocab) for vocab in different}) == len(different)


async def test_frames_of_another_verifier_or_epoch_are_dropped_and_counted():
    port = RecordingPort()
    async with serving(port) as (servicer, address), calling(address) as caller:
        await caller.hear()
        await caller.say(OPEN, epoch=2)
        await caller.say(OPEN, sender="w")
        await caller.say(COMMIT)
        await until(lambda: port.submitted)
        assert [payload for _, payload in port.submitted] == [encode(COMMIT)]
        assert servicer.counters.num_stale_frames == 2


async def test_a_newer_epoch_takes_over_and_an_older_one_is_refused():
    port = RecordingPort()
    newer = Hello(verifier_id="v", epoch=4, vocab_size=97)
    async with serving(port) as (servicer, address), calling(address) as first:
        await first.hear()
        (first_peer,) = port.deliver
        async with calling(address, newer, epoch=4) as second:
            assert (await second.call.read()).epoch == 4
            assert (await first.ended())[0] is grpc.StatusCode.ABORTED
            await until(lambda: port.gone == [first_peer])
            async with calling(address) as late:
                assert "epoch 3 of 'v' is over" in (await late.hear()).reason
            assert servicer.counters.num_superseded_streams == 1
            assert len(port.deliver) == 1, "the newer stream is still subscribed"


async def test_the_engine_forgets_a_verifier_that_went_away():
    port = RecordingPort()
    async with serving(port) as (_, address):
        async with calling(address) as caller:
            await caller.hear()
            (peer,) = port.deliver
        await until(lambda: port.gone == [peer])
        assert not port.deliver


async def test_a_bad_frame_fails_its_own_session_only():
    runner = FakeRunner()
    with running_engine(runner) as port:
        async with serving(port) as (servicer, address), calling(address) as caller:
            await caller.hear()
            await caller.say(OPEN)
            await caller.say(encode(Close(request_id="bad")).replace(b"request_id", b"request_xx"))
            await caller.say(encode(COMMIT).replace(b"position", b"poSition"))
            assert await caller.hear() == Resync(request_id="r")
            await caller.say(b"\xff\x00")
            await caller.say(Open(request_id="s", sampling=OPEN.sampling, token_ids=(4,)))
            await caller.say(Commit(request_id="s", round_id=1, position=1, token_ids=(), max_length=1))
            assert (await caller.hear()).token_ids == continuation([4], 1, runner.vocab_size)
            assert servicer.counters.num_bad_frames == 1


async def test_a_stream_of_garbage_is_ended():
    config = LinkServiceConfig(max_bad_frames=3)
    async with serving(RecordingPort(), config) as (_, address), calling(address) as caller:
        await caller.hear()
        for _ in range(4):
            await caller.say(b"garbage")
        assert (await caller.ended())[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_pong_comes_while_the_engine_is_busy():
    runner = FakeRunner()
    entered, release = threading.Event(), threading.Event()
    execute = runner.execute

    def slow(batch: Any, chosen: Any = None) -> Any:
        entered.set()
        release.wait(5)
        return execute(batch, chosen)

    runner.execute = slow
    with running_engine(runner) as port:
        async with serving(port) as (_, address), calling(address) as caller:
            await caller.hear()
            await caller.say(OPEN)
            await caller.say(COMMIT)
            await until(entered.is_set)
            await caller.say(Ping(sent_s=1.5, sequence=1))
            answer = await caller.hear()
            assert isinstance(answer, Pong)
            assert answer.sent_s == 1.5
            release.set()
            assert isinstance(await caller.hear(), Draft)


async def test_a_dead_engine_ends_the_stream_at_the_next_ping():
    port = RecordingPort()
    async with serving(port) as (servicer, address), calling(address) as caller:
        await caller.hear()
        await caller.say(Ping(sent_s=2.0, sequence=0))
        busy = DrafterLoad(num_sessions=1, queue_depth=2, mean_draft_s=0.25)
        assert await caller.hear() == Pong(sent_s=2.0, load=busy)
        port.is_dead = True
        await caller.say(Ping(sent_s=2.5, sequence=1))
        assert await caller.ended() == (grpc.StatusCode.UNAVAILABLE, "the engine has ended")
        await until(lambda: port.gone)
        assert not servicer._streams


def test_a_failing_engine_is_known_as_dead_by_its_port():
    runner = FakeRunner()

    def fail(batch: Any, chosen: Any = None) -> Any:
        raise ArithmeticError("no device")

    runner.execute = fail
    with running_engine(runner) as port:
        port.submit("p", encode(OPEN))
        port.submit("p", encode(COMMIT))
        port._thread.join(5)
        with pytest.raises(EngineDeadError, match="no device"):
            port.load()


async def test_a_verifier_that_does_not_read_loses_its_stream():
    port = RecordingPort()
    async with serving(port, LinkServiceConfig(max_queued_frames=4)) as (_, address), calling(address) as caller:
        await caller.hear()
        (deliver,) = port.deliver.values()
        for _ in range(100):
            deliver(b"x")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await asyncio.wait_for(read_to_the_end(caller.call), 5)
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@given(
    st.binary(max_size=80)
    | st.sampled_from([encode(OPEN), encode(COMMIT)]).flatmap(
        lambda good: st.tuples(st.integers(0, len(good) - 1), st.integers(0, 255)).map(
            lambda change: good[: change[0]] + bytes([change[1]]) + good[change[0] + 1 :]
        )
    )
)
def test_no_payload_breaks_the_servicers_decoder(payload: bytes):
    servicer = DrafterLinkServicer(RecordingPort(), IDENTITY)
    stream = type("Sink", (), {"peer": "p", "send": lambda self, answer: None})()
    assert servicer._take(stream, payload) in (True, False)
    name = peek_type(payload)
    assert name is None or isinstance(name, str)
    assert all(isinstance(request_id, str) for request_id in peek_request_ids(payload))


async def call_control(address: str, payload: bytes) -> ControlResult:
    async with grpc.aio.insecure_channel(address) as channel:
        answer = await DrafterLinkStub(channel).Control(Frame(payload=payload))
    return decode(answer.payload, (ControlResult,))


async def test_where_no_trainer_is_served_a_drafter_takes_no_orders():
    port = RecordingPort()
    async with serving(port) as (_, address):
        with pytest.raises(grpc.aio.AioRpcError, match="not for rollouts") as refused:
            await call_control(address, encode(UpdateDraftWeights(call_id="u", folder="f")))
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_trainers_call_is_answered_by_the_engine():
    port = RecordingPort()
    async with serving(port, rules=ControlRules(is_open=True)) as (_, address):
        message = UpdateDraftWeights(call_id="u", folder="f", weight_version="v7")
        assert await call_control(address, encode(message)) == ControlResult(call_id="u", weight_version="now v7")
        for wrong in (encode(OPEN), b"\xc1", encode(UpdateDraftWeights(call_id="twice", folder="f"))):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call_control(address, wrong)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        port.is_dead = True
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await call_control(address, encode(message))
        assert (lost.value.code(), lost.value.details()) == (grpc.StatusCode.UNAVAILABLE, "the engine has ended")
