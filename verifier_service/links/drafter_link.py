"""The verifier's end of the verifier-drafter link: one gRPC stream to one drafter, with heartbeat and reconnection.

Runs on an event loop in another process than the step loop. Messages of the engine and drafts pass through encoded;
`RelayDraftClient` decodes drafts beside the engine. Only heartbeats are handled here. If a drafter dies or freezes, the
link reports a `PeerState` with `is_up=False` and reconnects.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc

from outrider.proto.link_pb2 import Frame
from outrider.proto.link_pb2_grpc import DrafterLinkStub
from outrider.verifier_service.links.circuit_breaker import BreakerConfig, CircuitBreaker
from outrider.verifier_service.links.grpc_channel import LinkCredentials, metadata_of, open_channel
from outrider.verifier_service.messages.draft import PROTOCOL_VERSION
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import LinkEvent, PeerState, PeerWeights, Relay
from outrider.verifier_service.messages.link import (
    DRAFTER_MESSAGES,
    MAX_DRAFTER_FRAME_BYTES,
    Hello,
    Ping,
    Pong,
    Refuse,
    Welcome,
    frame_of,
    payloads_of,
    peek_type,
    take_together,
)
from outrider.verifier_service.messages.wire import WireError, decode, encode

logger = logging.getLogger(__name__)
_FOR_THE_ENGINE = frozenset(message.__name__ for message in DRAFTER_MESSAGES)
SMOOTHING = 1 / 8  # gain of the round trip estimate, as in TCP's retransmission timer (RFC 6298)


class LinkError(RuntimeError):
    """The connection failed or was refused; the text tells the operator why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """When a drafter counts as dead, and how fast the link reconnects."""

    handshake_timeout_s: float = 5.0
    ping_interval_s: float = 0.5
    max_silent_pings: int = 4  # dead after so many intervals without a frame: 2 s
    min_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    stable_s: float = 5.0  # after so long, a connection resets back-off and breaker
    max_queued_frames: int = 4096
    breaker: BreakerConfig = field(default_factory=BreakerConfig)


@dataclass(slots=True)
class LinkCounters:
    num_connections: int = 0
    num_failures: int = 0  # attempts that failed and connections that ended
    num_stale_frames: int = 0
    num_bad_frames: int = 0
    num_lost_frames: int = 0  # sent while down, or still queued when the link went down


class DrafterLink:
    """Keeps one stream to one drafter.

    Call `start`, `stop` and `send` on the event loop. `hello` names this verifier and epoch.
    """

    def __init__(
        self,
        address: str,
        *,
        drafter_id: str,
        hello: Hello,
        on_event: Callable[[LinkEvent], None],
        config: LinkConfig | None = None,
        credentials: LinkCredentials | None = None,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.address, self.drafter_id = address, drafter_id
        self.config = config or LinkConfig()
        self.breaker = CircuitBreaker(self.config.breaker)
        self.counters = LinkCounters()
        self.welcome: Welcome | None = None  # of the present connection
        self.load: DrafterLoad | None = None  # of the last Pong
        self.round_trip_s: float | None = None  # smoothed; None: not measured yet
        self.last_error: str | None = None  # why the link is or was down
        self._hello = hello
        self._on_event = on_event
        self._credentials = credentials
        self._clock = clock
        self._rng = rng or random.Random()
        self._outbox: collections.deque[bytes] = collections.deque()
        self._wake = asyncio.Event()
        self._overflowed = False
        self._num_silent_pings = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self.welcome is not None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"drafter-link {self.drafter_id}")

    def check(self) -> None:
        """Raise `RuntimeError` if the link's task has ended by itself."""
        if self._task is not None and self._task.done():
            raise RuntimeError(f"the link to drafter {self.drafter_id} has ended") from self._task.exception()

    async def stop(self) -> None:
        """Close the stream and stop reconnecting; no event follows."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = self.welcome = None

    def send(self, payloads: Sequence[bytes]) -> None:
        """Queue encoded messages, in order; never blocks.

        They are lost if the drafter is down. If the queue overflows, the connection ends: a gap in the commits would
        only cause resyncs.
        """
        if not self.is_up or self._overflowed:
            self.counters.num_lost_frames += len(payloads)
            return
        self._outbox.extend(payloads)
        self._overflowed = len(self._outbox) > self.config.max_queued_frames
        self._wake.set()

    # --- reconnection ---

    async def _run(self) -> None:
        backoff_s = self.config.min_backoff_s
        while True:
            begin_s = self._clock()
            if not self.breaker.allow(begin_s):
                await asyncio.sleep(self.breaker.wait_s(begin_s))
                continue
            reason = await self._connect()
            now_s = self._clock()
            self._go_down(reason)
            if now_s - begin_s >= self.config.stable_s:
                backoff_s = self.config.min_backoff_s
            self.breaker.record_failure(now_s)
            await asyncio.sleep(backoff_s * self._rng.uniform(0.5, 1.0))  # jitter: verifiers must not reconnect at once
            backoff_s = min(2 * backoff_s, self.config.max_backoff_s)

    async def _connect(self) -> str:
        """Open one connection and serve it until it ends; return why it ended."""
        channel = self._channel()
        try:
            call = DrafterLinkStub(channel).Stream(metadata=metadata_of(self._credentials))
            await self._handshake(call)
            await self._serve(call)
        except LinkError as error:
            return str(error)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            await channel.close()
        return "the drafter ended the stream"

    def _channel(self) -> grpc.aio.Channel:
        options = (
            # a pool of its own: grpc's shared subchannels would keep their back-off between attempts
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_receive_message_length", MAX_DRAFTER_FRAME_BYTES),
        )
        return open_channel(self.address, self._credentials, *options)

    async def _handshake(self, call: Any) -> None:
        try:
            async with asyncio.timeout(self.config.handshake_timeout_s):
                await call.write(self._frame(encode(self._hello)))
                frame = await call.read()
        except TimeoutError as error:
            raise LinkError(f"no answer to Hello within {self.config.handshake_timeout_s} s") from error
        except asyncio.InvalidStateError as error:  # the call ended during the write
            raise LinkError(f"{(await call.code()).name}: {await call.details()}") from error
        if frame is grpc.aio.EOF:
            raise LinkError(f"{(await call.code()).name}: {await call.details()}")
        self._go_up(self._accept(frame))

    def _accept(self, frame: Frame) -> Welcome:
        try:
            answer = decode(frame.payload, (Welcome, Refuse))
        except WireError as error:
            raise LinkError(f"malformed answer to Hello: {error}") from error
        if isinstance(answer, Refuse):
            raise LinkError(f"refused: {answer.reason}")
        if answer.protocol_version != PROTOCOL_VERSION:
            raise LinkError(f"protocol version {answer.protocol_version} of the drafter, {PROTOCOL_VERSION} here")
        if answer.drafter_id != self.drafter_id:
            raise LinkError(f"{self.address} is drafter {answer.drafter_id!r}, not {self.drafter_id!r}")
        if answer.tensors is not None and answer.tensors.transport not in self._hello.tensor_transports:
            raise LinkError(f"the drafter chose {answer.tensors.transport!r} for states, which was not offered")
        return answer

    def _go_up(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.counters.num_connections += 1
        self._outbox.clear()
        self._overflowed = False
        self._num_silent_pings = 0
        state = PeerState(
            peer=self.drafter_id,
            is_up=True,
            vocab_size=welcome.vocab_size,
            needs=welcome.needs,
            tensors=welcome.tensors,
        )
        self._on_event(state)

    def _go_down(self, reason: str) -> None:
        if reason != self.last_error:  # log a repeated failure once
            logger.warning("link to drafter %s at %s is down: %s", self.drafter_id, self.address, reason)
        self.last_error = reason
        self.counters.num_failures += 1
        self.counters.num_lost_frames += len(self._outbox)
        self._outbox.clear()
        was_up, self.welcome, self.load = self.is_up, None, None
        if was_up:
            self._on_event(PeerState(peer=self.drafter_id, is_up=False))

    # --- one connection ---

    async def _serve(self, call: Any) -> None:
        """Read, write and ping until one of them ends; re-raise its error."""
        tasks = [asyncio.ensure_future(part(call)) for part in (self._read_all, self._write_all, self._heartbeat)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read_all(self, call: Any) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._num_silent_pings = 0
            self._take(frame)
        code = await call.code()
        if code is not grpc.StatusCode.OK:
            raise LinkError(f"{code.name}: {await call.details()}")

    def _take(self, frame: Frame) -> None:
        if (frame.sender, frame.epoch) != (self._hello.verifier_id, self._hello.epoch):
            self.counters.num_stale_frames += 1
            return
        received_s = self._clock()
        for payload in payloads_of(frame):
            self._take_message(payload, received_s)

    def _take_message(self, payload: bytes, received_s: float) -> None:
        if peek_type(payload) in _FOR_THE_ENGINE:
            self._on_event(Relay(peer=self.drafter_id, payload=payload, received_s=received_s))
            return
        try:
            self._on_pong(decode(payload, (Pong,)))
        except WireError as error:
            self.counters.num_bad_frames += 1
            logger.warning("malformed frame from drafter %s dropped: %s", self.drafter_id, error)

    def _on_pong(self, pong: Pong) -> None:
        told = None if self.load is None else self.load.weight_version
        self.load, version = pong.load, pong.load.weight_version
        if version is not None and version != told:
            self._on_event(PeerWeights(peer=self.drafter_id, weight_version=version))
        sample_s = self._clock() - pong.sent_s
        known_s = self.round_trip_s
        self.round_trip_s = sample_s if known_s is None else known_s + SMOOTHING * (sample_s - known_s)

    async def _write_all(self, call: Any) -> NoReturn:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                if self._overflowed:
                    raise LinkError(f"more than {self.config.max_queued_frames} frames were waiting to be sent")
                await _write(call, self._frame(*take_together(self._outbox)))

    async def _heartbeat(self, call: Any) -> NoReturn:
        """Ping; raise `LinkError` after `max_silent_pings` intervals without a frame.

        Intervals are counted, not timed: after a pause of this process, the answers are still unread.
        """
        up_at_s, sequence = self._clock(), 0
        while self._num_silent_pings < self.config.max_silent_pings:
            self._outbox.append(encode(Ping(sent_s=self._clock(), sequence=sequence)))
            self._wake.set()
            sequence += 1
            self._num_silent_pings += 1
            await asyncio.sleep(self.config.ping_interval_s)
            if self._clock() - up_at_s >= self.config.stable_s:
                self.breaker.record_success(self._clock())
        raise LinkError(f"no sign of life for {self.config.max_silent_pings * self.config.ping_interval_s:.1f} s")

    def _frame(self, payload: bytes, *more: bytes) -> Frame:
        return frame_of(self._hello.verifier_id, self._hello.epoch, payload, more)


async def _write(call: Any, frame: Frame) -> None:
    try:
        await call.write(frame)
    except asyncio.InvalidStateError as error:  # the call has ended; its status tells why
        raise LinkError(f"{(await call.code()).name}: {await call.details()}") from error
