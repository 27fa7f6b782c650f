from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.drafter_service.service.service import DrafterLinkServicer, EngineDeadError
from outrider.proto.link_pb2_grpc import DrafterLinkServicer as DrafterLinkBase
from outrider.proto.link_pb2_grpc import add_DrafterLinkServicer_to_server
from outrider.verifier_service.links.circuit_breaker import BreakerConfig
from outrider.verifier_service.links.drafter_link import DrafterLink, LinkConfig
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DrafterMessage, DraftSampling, Open, Resync
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import BreakerState, LinkEvent, PeerState, PeerWeights
from outrider.verifier_service.messages.link import (
    CHANNEL_OPTIONS,
    DRAFTER_MESSAGES,
    MAX_DRAFTER_FRAME_BYTES,
    MAX_TOGETHER_BYTES,
    DrafterIdentity,
    Hello,
    Welcome,
    frame_of,
    payloads_of,
    peek_type,
    take_together,
)
from outrider.verifier_service.messages.wire import decode, encode
from support.waiting import until

IDENTITY = DrafterIdentity(drafter_id="d", vocab_size=9, vocab_fingerprint="", max_draft_length=8, max_model_len=64)
HELLO = Hello(verifier_id="v", epoch=7, vocab_size=9)
OPEN = Open(request_id="r", sampling=DraftSampling(temperature=0.0), token_ids=(1, 2))
COMMIT = Commit(request_id="r", round_id=1, position=2, token_ids=(), max_length=3)
FAST = LinkConfig(ping_interval_s=0.05, min_backoff_s=0.01, max_backoff_s=0.05, breaker=BreakerConfig(open_s=0.2))
FAST_BREAKER = LinkConfig(
    ping_interval_s=0.05,
    min_backoff_s=0.001,
    max_backoff_s=0.002,
    breaker=BreakerConfig(failure_threshold=3, open_s=60.0),
)

TESTS = Path(__file__).resolve().parents[2]

# A drafter process with a scripted engine: it drafts (1, 2, 3) for whatever is asked.
CHILD = """
import asyncio, sys
import grpc
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from fakes.in_process_port import InProcessPort
from outrider.drafter_service.service.service import DrafterLinkServicer
from outrider.proto.link_pb2_grpc import add_DrafterLinkServicer_to_server
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS, DrafterIdentity

class Scripted:
    vocab_size, max_model_len = 9, 64
    needs = DraftNeeds()
    def draft(self, asks, *, max_num_tokens):
        return [a.answer((1, 2, 3)[: a.length]) for a in asks]
    def release(self, key): pass
    def check_integrity(self, keys): pass

async def main(address):
    engine = DraftEngine(Scripted(), clock=lambda: 0.0, config=DraftEngineConfig())
    identity = DrafterIdentity(drafter_id="d", vocab_size=9, vocab_fingerprint="", max_draft_length=8, max_model_len=64)
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_DrafterLinkServicer_to_server(DrafterLinkServicer(InProcessPort(engine), identity), server)
    sys.stdout.write(f"{server.add_insecure_port(address)}\\n")
    await server.start()
    sys.stdout.flush()
    await server.wait_for_termination()

asyncio.run(main(sys.argv[1]))
"""


class EchoPort:
    """Answers every Commit with a fixed draft at once, on the caller's thread: what is left is the link's own cost."""

    def __init__(self, weight_version: str | None = None) -> None:
        self._deliver: dict[str, Callable[[bytes], None]] = {}
        self.peers: list[str] = []
        self.weight_version = weight_version

    def submit(self, peer: str, payload: bytes) -> None:
        self._deliver[peer](encode(Draft(request_id="r", round_id=1, position=2, token_ids=(1, 2, 3))))

    def peer_gone(self, peer: str) -> None:
        self.peers.remove(peer)

    def subscribe(self, peer: str, deliver: Callable[[bytes], None]) -> None:
        self._deliver[peer] = deliver
        self.peers.append(peer)

    def unsubscribe(self, peer: str) -> None:
        del self._deliver[peer]

    def load(self) -> Any:
        return DrafterLoad(num_sessions=4, weight_version=self.weight_version)


class Script(DrafterLinkBase):
    """A drafter that says what a test tells it to."""

    def __init__(self, talk: Callable[[Any], Any]) -> None:
        self._talk = talk

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        await self._talk(context)


@contextlib.asynccontextmanager
async def serving(servicer: Any, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = grpc.aio.server(options=CHANNEL_OPTIONS)
    add_DrafterLinkServicer_to_server(servicer, server)
    number = server.add_insecure_port(address)
    await server.start()
    try:
        yield f"127.0.0.1:{number}"
    finally:
        await server.stop(grace=None)


class Recorder:
    """A link's events, and waiting for them."""

    def __init__(self) -> None:
        self.events: list[LinkEvent] = []
        self._seen = 0

    async def message(self) -> DrafterMessage:
        """Wait for something that the drafter said, and decode it as the engine does."""
        return decode((await self.next()).payload, DRAFTER_MESSAGES)

    async def next(self, timeout_s: float = 10.0) -> LinkEvent:
        async with asyncio.timeout(timeout_s):
            while len(self.events) == self._seen:
                await asyncio.sleep(0.0005)
        self._seen += 1
        return self.events[self._seen - 1]


@contextlib.asynccontextmanager
async def linked(
    address: str, config: LinkConfig = FAST, **options: Any
) -> AsyncIterator[tuple[DrafterLink, Recorder]]:
    recorder = Recorder()
    arguments = {"drafter_id": "d", "hello": HELLO, **options}
    link = DrafterLink(address, on_event=recorder.events.append, config=config, **arguments)
    link.start()
    try:
        yield link, recorder
    finally:
        await link.stop()


@contextlib.contextmanager
def drafter_process(address: str = "127.0.0.1:0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    child = subprocess.Popen([sys.executable, "-c", CHILD, address], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None
        yield child, f"127.0.0.1:{child.stdout.readline().strip()}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)
        child.kill()
        child.wait()


async def test_up_draft_pong_and_round_trip():
    port = EchoPort()
    async with serving(DrafterLinkServicer(port, IDENTITY)) as address, linked(address) as (link, recorder):
        assert await recorder.next() == PeerState(peer="d", is_up=True, vocab_size=9)
        assert link.is_up
        link.send([encode(COMMIT)])
        event = await recorder.next()
        assert event.payload == encode(Draft(request_id="r", round_id=1, position=2, token_ids=(1, 2, 3)))
        assert 0.0 <= time.monotonic() - event.received_s < 10.0
        await until(lambda: link.load is not None)
        assert link.load.num_sessions == 4
        assert 0 < link.round_trip_s < 1
    await until(lambda: not port.peers)
    assert len(recorder.events) == 2, "stop is silent"


async def test_a_new_version_of_a_drafters_weights_is_told_once_on_each_connection():
    port = EchoPort(weight_version="")
    servicer = DrafterLinkServicer(port, IDENTITY)
    async with serving(servicer) as address:
        async with linked(address) as (_, recorder):
            assert isinstance(await recorder.next(), PeerState)
            assert await recorder.next() == PeerWeights(peer="d", weight_version="")
            port.weight_version = "v1"
            assert await recorder.next() == PeerWeights(peer="d", weight_version="v1")
            await asyncio.sleep(3 * FAST.ping_interval_s)
            assert len(recorder.events) == 3
        async with linked(address) as (_, recorder):
            assert isinstance(await recorder.next(), PeerState)
            assert await recorder.next() == PeerWeights(peer="d", weight_version="v1")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hello": Hello(verifier_id="v", epoch=7, vocab_size=10)}, "refused: the drafter's vocabulary has 9 tokens"),
        ({"hello": Hello(protocol_version=0, verifier_id="v", epoch=7, vocab_size=9)}, "refused: protocol version 0"),
        ({"drafter_id": "other"}, "is drafter 'd', not 'other'"),
    ],
)
async def test_refusals_reach_the_operator_and_no_event_says_up(options: Any, reason: str, caplog: Any):
    servicer = DrafterLinkServicer(EchoPort(), IDENTITY)
    async with serving(servicer) as address, linked(address, **options) as (link, recorder):
        await until(lambda: link.counters.num_failures >= 2)
        assert reason in link.last_error
        assert recorder.events == []
    assert sum(reason in record.message for record in caplog.records if "link to" in record.message) == 1


async def test_an_unreachable_drafter_opens_the_breaker_which_stops_the_attempts():
    async with linked("127.0.0.1:1", FAST_BREAKER) as (link, _):
        await until(lambda: link.breaker.state is BreakerState.OPEN)
        assert link.counters.num_failures == 3
        await asyncio.sleep(0.1)
        assert link.counters.num_failures == 3
        link.send([b"lost"])
        assert link.counters.num_lost_frames == 1


async def test_a_stable_connection_closes_the_breaker():
    config = LinkConfig(ping_interval_s=0.01, stable_s=0.0, breaker=BreakerConfig(failure_threshold=2))
    async with serving(DrafterLinkServicer(EchoPort(), IDENTITY)) as address:
        recorder = Recorder()
        link = DrafterLink(address, drafter_id="d", hello=HELLO, on_event=recorder.events.append, config=config)
        link.breaker.record_failure(0.0)
        link.start()
        await recorder.next()
        await asyncio.sleep(0.1)
        link.breaker.record_failure(0.0)
        assert link.breaker.state is BreakerState.CLOSED
        await link.stop()


async def test_stale_and_malformed_frames_are_dropped_and_counted():
    async def talk(context: Any) -> None:
        await context.read()
        await context.write(frame_of("v", 7, encode(IDENTITY.welcome())))
        await context.write(frame_of("v", 6, encode(Resync(request_id="stale"))))
        await context.write(frame_of("w", 7, encode(Resync(request_id="stale"))))
        await context.write(frame_of("v", 7, b"garbage"))
        await context.write(frame_of("v", 7, encode(Close(request_id="not for me"))))
        await context.write(frame_of("v", 7, encode(Resync(request_id="r"))))
        await asyncio.sleep(60)

    async with serving(Script(talk)) as address, linked(address) as (link, recorder):
        await recorder.next()
        assert await recorder.message() == Resync(request_id="r")
        assert (link.counters.num_stale_frames, link.counters.num_bad_frames) == (2, 2)


async def test_a_draft_passes_undecoded_and_is_refused_where_it_is_decoded():
    """Its type is in front; whether the rest is a draft is found out beside the engine, once."""
    bad = encode(Draft(request_id="r", round_id=1, position=2, token_ids=(1,))).replace(b"token_ids", b"token_idz")

    async def talk(context: Any) -> None:
        await context.read()
        await context.write(frame_of("v", 7, encode(IDENTITY.welcome())))
        await context.write(frame_of("v", 7, bad))
        await asyncio.sleep(60)

    async with serving(Script(talk)) as address, linked(address) as (link, recorder):
        await recorder.next()
        relay = await recorder.next()
        assert (relay.payload, link.counters.num_bad_frames) == (bad, 0)
    client = RelayDraftClient()
    client.feed(relay)
    assert (client.poll(), client.num_bad_frames) == ([], 1)


async def test_what_waits_together_goes_and_comes_in_one_frame_in_order():
    frames: list[list[bytes]] = []

    async def talk(context: Any) -> None:
        await context.read()
        await context.write(frame_of("v", 7, encode(IDENTITY.welcome())))
        while sum(map(len, frames)) < 4:
            payloads = [payload for payload in payloads_of(await context.read()) if peek_type(payload) != "Ping"]
            frames.extend([payloads] if payloads else [])
        answers = [encode(Resync(request_id=name)) for name in ("a", "b")]
        await context.write(frame_of("v", 7, answers[0], [b"garbage", answers[1]]))
        await asyncio.sleep(60)

    async with serving(Script(talk)) as address, linked(address) as (link, recorder):
        assert (await recorder.next()).is_up
        closes = [encode(Close(request_id=name)) for name in ("a", "b", "c", "d")]
        link.send(closes)
        relays = [await recorder.next(), await recorder.next()]
        assert [decode(relay.payload, (Resync,)).request_id for relay in relays] == ["a", "b"]
        assert [payload for frame in frames for payload in frame] == closes
        assert len(frames) == 1
        assert link.counters.num_bad_frames == 1


def test_a_long_message_goes_alone():
    short, long = b"s" * 10, b"l" * MAX_TOGETHER_BYTES
    outbox = collections.deque([short, short, long, short])
    assert take_together(outbox) == [short, short]
    assert take_together(outbox) == [long]
    assert take_together(outbox) == [short]
    assert not outbox


async def test_an_oversized_draft_costs_the_link_before_it_is_decoded():
    async def talk(context: Any) -> None:
        await context.read()
        await context.write(frame_of("v", 7, encode(IDENTITY.welcome())))
        many = (1,) * MAX_DRAFTER_FRAME_BYTES
        await context.write(frame_of("v", 7, encode(Draft(request_id="r", round_id=1, position=2, token_ids=many))))
        await asyncio.sleep(60)

    async with serving(Script(talk)) as address, linked(address, LinkConfig(max_silent_pings=100)) as (_, recorder):
        assert (await recorder.next()).is_up
        assert not (await recorder.next()).is_up


OLD_WELCOME = Welcome(protocol_version=0, drafter_id="d", vocab_size=9, max_draft_length=1, max_model_len=1)


@pytest.mark.parametrize("answer", [b"garbage", encode(OLD_WELCOME)])
async def test_bad_answers_to_hello_are_failures(answer: bytes):
    async def talk(context: Any) -> None:
        await context.read()
        await context.write(frame_of("v", 7, answer))
        await asyncio.sleep(60)

    async with serving(Script(talk)) as address, linked(address) as (link, recorder):
        await until(lambda: link.counters.num_failures >= 1)
        assert recorder.events == []


async def test_a_drafter_that_never_pongs_is_dead_after_the_silence():
    async def talk(context: Any) -> None:
        await context.read()
        await context.write(frame_of("v", 7, encode(IDENTITY.welcome())))
        await asyncio.sleep(60)

    async with serving(Script(talk)) as address, linked(address) as (link, recorder):
        await recorder.next()
        began_s = time.monotonic()
        event = await recorder.next()
        assert not event.is_up
        assert link.last_error == "no sign of life for 0.2 s"
        assert 0.15 < time.monotonic() - began_s < 2.0


async def test_overflow_drops_the_link_and_its_frames_and_it_comes_back():
    config = LinkConfig(ping_interval_s=0.05, min_backoff_s=0.01, max_queued_frames=10)
    servicer = DrafterLinkServicer(EchoPort(), IDENTITY)
    async with serving(servicer) as address, linked(address, config) as (link, recorder):
        await recorder.next()
        link.send([encode(COMMIT)] * 11)
        assert not (await recorder.next()).is_up
        assert "more than 10 frames" in link.last_error
        assert link.counters.num_lost_frames >= 11
        assert (await recorder.next()).is_up
        link.send([encode(COMMIT)])
        assert isinstance(await recorder.message(), Draft)


async def test_a_dead_engine_takes_the_link_down():
    class DeadPort(EchoPort):
        def load(self) -> Any:
            raise EngineDeadError("the engine has ended")

    servicer = DrafterLinkServicer(DeadPort(), IDENTITY)
    async with serving(servicer) as address, linked(address) as (link, recorder):
        await recorder.next()
        assert not (await recorder.next()).is_up
        assert link.last_error == "UNAVAILABLE: the engine has ended"


async def test_a_killed_drafter_is_seen_at_once_and_its_successor_is_found():
    with drafter_process() as (child, address):
        async with linked(address) as (link, recorder):
            assert (await recorder.next()).is_up
            link.send([encode(OPEN), encode(COMMIT)])
            assert (await recorder.message()).token_ids == (1, 2, 3)
            os.kill(child.pid, signal.SIGKILL)
            killed_s = time.monotonic()
            assert not (await recorder.next()).is_up
            assert time.monotonic() - killed_s < 1.0
            with drafter_process(address):
                assert (await recorder.next()).is_up
                link.send([encode(COMMIT)])
                assert await recorder.message() == Resync(request_id="r"), "the successor knows nothing"


async def test_a_frozen_drafter_is_noticed_by_the_heartbeat():
    with drafter_process() as (child, address):
        async with linked(address, LinkConfig()) as (link, recorder):
            assert (await recorder.next()).is_up
            await until(lambda: link.load is not None)
            os.kill(child.pid, signal.SIGSTOP)
            stopped_s = time.monotonic()
            event = await recorder.next()
            assert not event.is_up
            assert 1.0 < time.monotonic() - stopped_s < 4.0
            os.kill(child.pid, signal.SIGCONT)
            assert (await recorder.next()).is_up
