"""The drafter's end of the verifier-drafter link: a gRPC servicer in front of a drafting engine.

The servicer handles handshake, heartbeat and fencing. Messages for the engine pass through undecoded: the engine may be
in another process, and decoding does not block the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from outrider.proto.link_pb2 import Frame
from outrider.verifier_service.links.control_rules import NO_ORDERS, ControlRules
from outrider.verifier_service.links.control_table import serve_control
from outrider.verifier_service.links.outbox import Outbox
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import Control, ControlResult
from outrider.verifier_service.messages.link import (
    VERIFIER_MESSAGES,
    DrafterIdentity,
    Hello,
    Ping,
    Pong,
    Refuse,
    frame_of,
    payloads_of,
    peek_type,
    refusal_reason,
)
from outrider.verifier_service.messages.tensor_route import TensorRoute
from outrider.verifier_service.messages.wire import WireError, decode, encode

logger = logging.getLogger(__name__)
_ENGINE_TYPES = frozenset(message_type.__name__ for message_type in VERIFIER_MESSAGES)


class EngineDeadError(RuntimeError):
    """The drafting engine has ended."""


class EnginePort(Protocol):
    """The connection to a drafting engine on another thread or in another process.

    No call blocks. Once the engine has ended, `load` raises `EngineDeadError`, and the first two may.
    """

    def submit(self, peer: str, payload: bytes) -> None:
        """Send one encoded message for the engine: Open, Seed, States, Commit or Close."""

    def peer_gone(self, peer: str) -> None:
        """Close a peer's sessions."""

    def subscribe(self, peer: str, deliver: Callable[[bytes], None]) -> None:
        """Register a function that gets a peer's encoded answers, on any thread."""

    def unsubscribe(self, peer: str) -> None: ...

    def open_tensors(self, peer: str, route: TensorRoute) -> None:
        """Open a channel for a peer's hidden states; only if the drafter's identity offers one."""

    def load(self) -> DrafterLoad:
        """Return the engine's last reported load; raises `EngineDeadError` if it has ended."""

    async def control(self, message: Control) -> ControlResult:
        """Return what the engine answers to a trainer's call; raises `ConnectionError` if the engine is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkServiceConfig:
    """Limits of a stream."""

    hello_timeout_s: float = 5.0
    max_bad_frames: int = 100  # a stream with more is ended
    max_queued_frames: int = 4096  # answers not read by the verifier


@dataclass(slots=True)
class ServiceCounters:
    num_refused: int = 0
    num_bad_frames: int = 0
    num_stale_frames: int = 0
    num_superseded_streams: int = 0


class _Stream:
    """One accepted stream: its peer and its outgoing queue."""

    def __init__(self, hello: Hello, peer: str, max_queued_frames: int) -> None:
        self.verifier_id, self.epoch, self.peer = hello.verifier_id, hello.epoch, peer
        self._loop = asyncio.get_running_loop()
        self.end = self._loop.create_future()  # its result (code, details) ends the stream
        self._outbox = Outbox(hello.verifier_id, hello.epoch)
        self._max_queued = max_queued_frames

    def deliver(self, payload: bytes) -> None:
        """Send, from any thread; once the event loop has closed, do nothing."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.send, payload)

    def send(self, payload: bytes) -> None:
        if len(self._outbox) < self._max_queued:
            self._outbox.put_encoded(payload)
        else:
            self.finish(grpc.StatusCode.RESOURCE_EXHAUSTED, "the verifier does not read its drafts")

    def finish(self, code: grpc.StatusCode, details: str) -> None:
        if not self.end.done():
            self.end.set_result((code, details))

    async def write_all(self, context: Any) -> None:
        async for frame in self._outbox.frames():
            await context.write(frame)


class DrafterLinkServicer:
    """Serves `outrider.link.v1.DrafterLink`; register it with `add_DrafterLinkServicer_to_server`."""

    def __init__(
        self,
        port: EnginePort,
        identity: DrafterIdentity,
        config: LinkServiceConfig | None = None,
        rules: ControlRules = NO_ORDERS,
    ) -> None:
        """`rules`: of `Control`."""
        self.counters = ServiceCounters()
        self._rules = rules
        self._port = port
        self._identity = identity
        self._config = config or LinkServiceConfig()
        self._streams: dict[str, _Stream] = {}  # the live stream of each verifier
        self._num_streams = 0

    async def Stream(self, request_iterator: Any, context: Any) -> None:
        """Serve one verifier until it disconnects, restarts with a newer epoch, or breaks the protocol."""
        hello = await self._handshake(context)
        stream = self._register(hello)
        try:
            self._port.subscribe(stream.peer, stream.deliver)
            if (route := self._identity.route(hello, stream.peer)) is not None:
                self._port.open_tensors(stream.peer, route)
            stream.send(encode(self._identity.welcome(route)))
            await self._serve(stream, context)
        finally:
            if self._streams.get(stream.verifier_id) is stream:
                del self._streams[stream.verifier_id]
            self._port.unsubscribe(stream.peer)
            with contextlib.suppress(EngineDeadError):  # sessions ended with the engine
                self._port.peer_gone(stream.peer)

    async def Control(self, frame: Frame, context: Any) -> Frame:
        """Serve one call of a trainer's, by way of a gateway."""
        return await serve_control(self._port.control, self._rules, frame, context)

    async def _handshake(self, context: Any) -> Hello:
        """Read and check the first frame; a stream without a matching `Hello` ends here."""
        try:
            async with asyncio.timeout(self._config.hello_timeout_s):
                frame = await context.read()
        except TimeoutError:
            await self._refuse(context, None, f"no Hello within {self._config.hello_timeout_s} s")
        if frame is grpc.aio.EOF:
            await self._refuse(context, None, "the stream ended before its Hello")
        try:
            hello = decode(frame.payload, (Hello,))
        except WireError as error:
            await self._refuse(context, frame, f"the first frame must be Hello: {error}")
        reason = refusal_reason(hello, self._identity) or self._fenced(hello, frame)
        if reason is not None:
            await self._refuse(context, frame, reason)
        return hello

    def _fenced(self, hello: Hello, frame: Frame) -> str | None:
        if (frame.sender, frame.epoch) != (hello.verifier_id, hello.epoch):
            return "the frame around Hello names another verifier or epoch"
        live = self._streams.get(hello.verifier_id)
        if live is not None and live.epoch > hello.epoch:
            return f"epoch {hello.epoch} of {hello.verifier_id!r} is over: epoch {live.epoch} is connected"
        return None

    async def _refuse(self, context: Any, frame: Frame | None, reason: str) -> None:
        self.counters.num_refused += 1
        logger.warning("drafter %s refused a verifier: %s", self._identity.drafter_id, reason)
        if frame is not None:
            await context.write(frame_of(frame.sender, frame.epoch, encode(Refuse(reason=reason))))
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)

    def _register(self, hello: Hello) -> _Stream:
        """Register a verifier's live stream and end its predecessor.

        There must be no await between the check of `Hello` and this, or an older epoch could register in between.
        """
        self._num_streams += 1
        # every connection is a separate peer: its end cannot close the next one's sessions
        peer = f"{hello.verifier_id}/{hello.epoch}/{self._num_streams}"
        older = self._streams.get(hello.verifier_id)
        if older is not None:
            self.counters.num_superseded_streams += 1
            older.finish(grpc.StatusCode.ABORTED, "superseded by a newer stream of this verifier")
        stream = self._streams[hello.verifier_id] = _Stream(hello, peer, self._config.max_queued_frames)
        return stream

    async def _serve(self, stream: _Stream, context: Any) -> None:
        # by default grpc sends it with the first write: if that were cancelled, the stream's end would never be sent
        await context.send_initial_metadata(())
        parts = (self._read_all(stream, context), stream.write_all(context))
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            done, _ = await asyncio.wait([*tasks, stream.end], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if stream.end.done():
            code, details = stream.end.result()
            await context.abort(code, details)
        for ended in done:
            ended.result()

    async def _read_all(self, stream: _Stream, context: Any) -> None:
        num_bad_frames = 0
        while (frame := await context.read()) is not grpc.aio.EOF:
            if (frame.sender, frame.epoch) != (stream.verifier_id, stream.epoch):
                self.counters.num_stale_frames += 1
                continue
            num_bad = sum(not self._take(stream, payload) for payload in payloads_of(frame))
            self.counters.num_bad_frames += num_bad
            num_bad_frames += num_bad
            if num_bad_frames > self._config.max_bad_frames:
                stream.finish(grpc.StatusCode.INVALID_ARGUMENT, "too many malformed frames")

    def _take(self, stream: _Stream, payload: bytes) -> bool:
        """Handle one payload; return False if it is malformed. The engine checks its messages' contents."""
        name = peek_type(payload)
        try:
            if name in _ENGINE_TYPES:
                self._port.submit(stream.peer, payload)
            elif name == Ping.__name__:
                self._pong(stream, decode(payload, (Ping,)))
            else:
                return False
        except WireError:
            return False
        except EngineDeadError as error:
            stream.finish(grpc.StatusCode.UNAVAILABLE, str(error))
        return True

    def _pong(self, stream: _Stream, ping: Ping) -> None:
        stream.send(encode(Pong(sent_s=ping.sent_s, load=self._port.load())))
