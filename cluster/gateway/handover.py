"""A request that changes its verifier with its KV, as the gateway sees it: one stream after another.

    giver  |-- prefill --|t0, is_held|. . . stands still . . .|  closed: its KV is freed
    taker      |- - - - takes the KV, as it is computed - - -|t1|t2|t3 ...
                                                             ^ published from here on

The giver is a verifier of role `prefill`, or one that drains or is crowded: then the taker begins once `is_held` has
come. Only one of the two is read at a time, so no token is published twice. A taker that lacks anything ends as
`NOT_TAKEN`, and has drawn nothing: the request goes on from what was published, as after a loss.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.cluster.gateway.kv_transfer import KeptOutput
from outrider.cluster.gateway.verifier_streams import Hear, Stream, VerifierLost
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.request import RequestOutput

KEPT_S = 30.0  # how long KV waits, at most, for a request that a client sends after the prompt's


class OnHandover(Protocol):
    """Count a handover that has ended: `GatewayMetrics.handover_ended`."""

    def __call__(self, outcome: str, reason: str = "", *, waited_s: float | None = None) -> None: ...


def ignore_handover(outcome: str, reason: str = "", *, waited_s: float | None = None) -> None:
    """Count nothing."""


@dataclass(slots=True, kw_only=True)
class Migration:
    """A request's way from one verifier to the next."""

    stream: Stream  # that is read
    taker: Stream | None = None  # that has begun already, while the first one prefills
    find_taker: Callable[[Stream], Awaitable[Stream | None]]  # for a request that stands still; None: there is none
    on_taken: Callable[[KVSource], None]  # before the taker's first output
    tell: OnHandover
    clock: Callable[[], float]
    _giver: Stream | None = None  # that stands still, until the taker has all
    _held_s: float | None = None  # since when
    _is_move: bool = False
    _has_taken: bool = False  # the stream that is read, where it takes over

    async def run(self, hear: Hear) -> None:
        """Pass all outputs on, whichever verifiers they come from; every stream ends with this call.

        Raises `NotTaken` or `VerifierLost`; what was not passed on by then has not been drawn, or is lost.
        """
        try:
            while True:
                last = await self.stream.run(hear if self.stream.source is None else self._hear_taker(hear))
                if last.finish_reason is not None:
                    return
                await self._change_over()
        finally:
            for stream in (self.stream, self.taker, self._giver):
                if stream is not None:
                    stream.end()

    def _hear_taker(self, hear: Hear) -> Hear:
        """Return what hears a stream that takes KV over: with its first output it has all."""

        def hear_taker(output: RequestOutput) -> None:
            if self.stream.source is not None and not self._has_taken:
                self._end_handover(self.stream.source)
            hear(output)

        return hear_taker

    async def _change_over(self) -> None:
        """Read the taker from now on; where there is none, the verifier goes on by itself."""
        self._held_s, self._is_move = self.clock(), self.taker is None
        taker = self.taker or await self.find_taker(self.stream)
        if taker is not None:
            self._giver, self.stream, self.taker, self._has_taken = self.stream, taker, None, False

    def _end_handover(self, source: KVSource) -> None:
        """The taker has all: the giver's KV can go."""
        self._has_taken = True
        self.on_taken(source)
        waited_s = None if self._held_s is None else self.clock() - self._held_s
        self.tell("moved" if self._is_move else "taken", waited_s=waited_s)
        giver, self._giver = self._giver, None
        if giver is not None:
            giver.end()


class KeptStreams:
    """Streams that stand still behind their answer, for requests that name them."""

    def __init__(self) -> None:
        self._waits: dict[KVSource, asyncio.Task[None]] = {}

    async def run(self, stream: Stream, hear: Hear) -> None:
        """Pass a prompt's one token on, and keep the stream open behind it unless the request has ended there."""
        is_kept = False

        def hear_kept(output: RequestOutput) -> None:
            if output.is_held:
                output = KeptOutput.of(output, stream.place, stream.verifier_id)
            hear(output)

        try:
            is_kept = (await stream.run(hear_kept)).is_held
        finally:
            if not is_kept:
                stream.end()
        if is_kept:
            self._waits[stream.place] = asyncio.create_task(self._wait(stream))
            await asyncio.sleep(0)  # cancelled before it has begun, it would not end the stream

    async def _wait(self, stream: Stream) -> None:
        """Hold a stream until its verifier goes on by itself, since nobody came, or `KEPT_S` have passed."""
        try:
            with contextlib.suppress(VerifierLost, TimeoutError, _NobodyCame):
                async with asyncio.timeout(KEPT_S):
                    await stream.run(_go_on)
        finally:
            del self._waits[stream.place]
            stream.end()

    def release(self, source: KVSource) -> None:
        """End what has been taken; another gateway's is ended there."""
        wait = self._waits.get(dataclasses.replace(source, draws_anew=False))
        if wait is not None:
            wait.cancel()

    async def close(self) -> None:
        waits = list(self._waits.values())
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


class _NobodyCame(Exception):
    """A verifier goes on with a request that nobody took."""


def _go_on(output: RequestOutput) -> None:
    raise _NobodyCame
