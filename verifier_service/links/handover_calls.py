"""A verifier's calls to and from other verifiers, for the KV of requests that change hands: shells only pass it on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc

from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.links.grpc_channel import LinkCredentials, metadata_of, open_channel
from outrider.verifier_service.messages.engine import EngineUpdate
from outrider.verifier_service.messages.handover import (
    EndTake,
    GivenFrame,
    HandOver,
    KVSource,
    KVTerms,
    PartsRead,
    TakeKV,
    TakenFrame,
)
from outrider.verifier_service.messages.wire import decode, encode

logger = logging.getLogger(__name__)


class NoHandoverCalls:
    """Calls of a verifier whose KV stays where it is."""

    def give(self, payload: bytes) -> AsyncGenerator[bytes]:
        """Yield the engine's frames for one taker; closing the generator tells the engine that the taker has hung up.

        Raises `NotImplementedError` where no KV is given, `WireError` for what is no `TakeKV`, `ConnectionError` when
        there is no engine.
        """
        raise NotImplementedError("this engine gives no KV to others")

    def hold(self, max_held: int | None = None) -> None:
        """Have running requests stand still for other verifiers to take; raises `ConnectionError` without an engine."""

    def deliver(self, update: EngineUpdate) -> None:
        """Pass on what the engine gives, and call or hang up as it asks."""

    def fail(self, reason: str) -> None:
        """End all calls: the engine is gone."""

    async def close(self) -> None:
        """End all calls."""


NO_HANDOVERS = NoHandoverCalls()


class HandoverCalls(NoHandoverCalls):
    """All calls of one verifier, to be used on its event loop."""

    def __init__(
        self, send: Callable[[Any], None], credentials: LinkCredentials | None = None, verifier_id: str = ""
    ) -> None:
        """`send` hands a message to the engine; raises `ConnectionError` if there is none."""
        self._send, self._credentials, self._verifier_id = send, credentials, verifier_id
        self._serial = itertools.count()
        self._open: dict[str, asyncio.Queue[GivenFrame | ConnectionError]] = {}  # other verifiers' calls, by take id
        self._pulls: dict[str, asyncio.Task[None]] = {}  # own calls, by request

    async def give(self, payload: bytes) -> AsyncGenerator[bytes]:
        asked: TakeKV = decode(payload, (TakeKV,))
        take_id = f"{next(self._serial)}"  # the taker's own would not be unique
        queue = self._open[take_id] = asyncio.Queue()
        try:
            self._send(TakeKV(take_id=take_id, request_id=asked.request_id, terms=asked.terms))
            is_last = False
            while not is_last:
                frame = await queue.get()
                if isinstance(frame, ConnectionError):
                    raise frame
                yield frame.payload
                self._tell(PartsRead(take_id=take_id, num_bytes=len(frame.payload)))  # it was written to the link
                is_last = frame.is_last
            await asyncio.Event().wait()  # until the taker hangs up: it may not have all tensors yet
        finally:
            del self._open[take_id]
            self._tell(EndTake(take_id=take_id))

    def hold(self, max_held: int | None = None) -> None:
        self._send(HandOver(max_held=max_held))

    def deliver(self, update: EngineUpdate) -> None:
        for frame in update.given:
            if (queue := self._open.get(frame.take_id)) is not None:
                queue.put_nowait(frame)
        for pull in update.pulls:
            if pull.terms is not None:
                call = self._pull(pull.request_id, pull.source, pull.terms)
                self._pulls[pull.request_id] = asyncio.ensure_future(call)
            elif (task := self._pulls.pop(pull.request_id, None)) is not None:
                task.cancel()

    def fail(self, reason: str) -> None:
        for queue in self._open.values():
            queue.put_nowait(ConnectionError(reason))
        for task in self._pulls.values():
            task.cancel()
        self._pulls.clear()

    async def close(self) -> None:
        tasks = list(self._pulls.values())
        self.fail("the verifier is stopping")
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pull(self, request_id: str, source: KVSource, terms: KVTerms) -> None:
        """Pass a giver's frames to the engine until the engine hangs up or the giver is gone."""
        ask = TakeKV(take_id="", request_id=source.request_id, terms=terms)
        channel = open_channel(source.endpoint, self._credentials)
        try:
            stub = link_pb2_grpc.VerifierLinkStub(channel)
            frame = link_pb2.Frame(sender=self._verifier_id, payload=encode(ask))
            call = stub.TakeKV(frame, metadata=metadata_of(self._credentials))
            async for frame in call:
                self._tell(TakenFrame(request_id=request_id, payload=frame.payload))
            error = "the giver hung up"
        except grpc.aio.AioRpcError as lost:
            error = f"{lost.code().name}: {lost.details()}"
        finally:
            await channel.close()
        self._tell(TakenFrame(request_id=request_id, payload=b"", error=error))

    def _tell(self, message: EndTake | PartsRead | TakenFrame) -> None:
        try:
            self._send(message)
        except ConnectionError:
            logger.debug("no engine is left to hear of a handover")
