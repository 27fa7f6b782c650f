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
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from outrider.cluster.gateway.kv_transfer import KeptOutput
from outrider.cluster.gateway.verifier_streams import VerifierLost
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput

KEPT_S = 30.0  # how long KV waits, at most, for a request that a client sends after the prompt's
_SHORT_REASON = re.compile(r"([A-Za-z][A-Za-z_ ]{0,31})(:|$)")


class TellHandover(Protocol):
    """Count a handover that has ended: `GatewayMetrics.handover_ended`."""

    def __call__(self, outcome: str, reason: str = "", *, waited_s: float | None = None) -> None: ...


def ignore_handover(outcome: str, reason: str = "", *, waited_s: float | None = None) -> None:
    """Count nothing."""


class NotTaken(Exception):
    """A verifier could not take a request over; nothing was drawn."""

    @property
    def label(self) -> str:
        """The reason, for a metric: what stands before the colon, if it is short and plain."""
        found = _SHORT_REASON.match(str(self))
        return "other" if found is None else found[1].replace(" ", "_").lower()


class Leg:
    """A request at one verifier: its stream, which begins at once, whether or not it is read."""

    def __init__(
        self,
        verifier_id: str,
        endpoint: str,
        message: GenerationRequest,
        outputs: AsyncGenerator[RequestOutput],
        on_close: Callable[[str], None],
    ) -> None:
        """`on_close` is told the request's id once the stream is closed."""
        self.verifier_id = verifier_id
        self._on_close = on_close
        self.place = KVSource(endpoint=endpoint, request_id=message.request_id)
        self.source = message.kv_source  # what it takes over
        self._outputs = outputs
        self._first: asyncio.Task[RequestOutput] | None = asyncio.create_task(_next_of(outputs))

    @property
    def has_begun(self) -> bool:
        """Whether its first output was read."""
        return self._first is None

    async def next(self) -> RequestOutput:
        """Wait for the next output; raises `NotTaken`, `VerifierLost`, or the error of the request."""
        first, self._first = self._first, None
        output = await (_next_of(self._outputs) if first is None else first)
        if output.finish_reason is FinishReason.NOT_TAKEN:
            if self.source is None:
                raise VerifierLost(self.verifier_id, "it took nothing over, where nothing was", was_accepted=True)
            raise NotTaken(output.error or "")
        return output

    async def close(self) -> None:
        """End the stream: the verifier frees what it holds for it."""
        if self._first is not None:
            self._first.cancel()
            await asyncio.gather(self._first, return_exceptions=True)
        await self._outputs.aclose()
        self._on_close(self.place.request_id)


async def _next_of(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    return await anext(outputs)


@dataclass(slots=True, kw_only=True)
class Journey:
    """A request's way from one verifier to the next."""

    leg: Leg  # that is read
    taker: Leg | None = None  # that has begun already, while the first one prefills
    find_taker: Callable[[Leg], Awaitable[Leg | None]]  # for a request that its verifier holds; None: there is none
    on_taken: Callable[[KVSource], None]  # before the taker's first output
    tell: TellHandover
    clock: Callable[[], float]
    _giver: Leg | None = None  # that stands still, until the taker has all
    _held_s: float | None = None  # since when
    _is_move: bool = False

    async def outputs(self) -> AsyncGenerator[RequestOutput]:
        """Yield all outputs, whichever verifiers they come from; closing the generator ends every stream.

        Raises `NotTaken` or `VerifierLost`; what was not yielded by then has not been drawn, or is lost.
        """
        try:
            while True:
                source = None if self.leg.has_begun else self.leg.source
                output = await self.leg.next()
                if source is not None:
                    await self._end_handover(source)
                if output.token_ids or not output.is_held:
                    yield output
                if output.finish_reason is not None:
                    return
                if output.is_held:
                    await self._change_over()
        finally:
            for leg in (self.leg, self.taker, self._giver):
                if leg is not None:
                    await leg.close()

    async def _change_over(self) -> None:
        """Read the taker from now on; where there is none, the verifier goes on by itself."""
        self._held_s, self._is_move = self.clock(), self.taker is None
        taker = self.taker or await self.find_taker(self.leg)
        if taker is not None:
            self._giver, self.leg, self.taker = self.leg, taker, None

    async def _end_handover(self, source: KVSource) -> None:
        """The taker has all: the giver's KV can go."""
        self.on_taken(source)
        waited_s = None if self._held_s is None else self.clock() - self._held_s
        self.tell("moved" if self._is_move else "taken", waited_s=waited_s)
        giver, self._giver = self._giver, None
        if giver is not None:
            await giver.close()


class KeptLegs:
    """Streams that stand still behind their answer, for requests that name them."""

    def __init__(self) -> None:
        self._waits: dict[KVSource, asyncio.Task[None]] = {}

    async def outputs(self, leg: Leg) -> AsyncGenerator[RequestOutput]:
        """Yield a prompt's one token, and keep the stream open behind it unless the request has ended there."""
        is_kept = False
        try:
            while True:
                output = await leg.next()
                if output.is_held:
                    is_kept = True
                    self._waits[leg.place] = asyncio.create_task(self._wait(leg))
                    await asyncio.sleep(0)  # cancelled before it has begun, it would not close the stream
                    output = KeptOutput.of(output, leg.place, leg.verifier_id)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            if not is_kept:
                await leg.close()

    async def _wait(self, leg: Leg) -> None:
        """Hold a stream until its verifier goes on by itself, since nobody came, or `KEPT_S` have passed."""
        try:
            with contextlib.suppress(VerifierLost, TimeoutError):
                async with asyncio.timeout(KEPT_S):
                    await leg.next()
        finally:
            del self._waits[leg.place]
            await leg.close()

    def release(self, source: KVSource) -> None:
        """Close what has been taken; another gateway's is closed there."""
        wait = self._waits.get(dataclasses.replace(source, draws_anew=False))
        if wait is not None:
            wait.cancel()

    async def close(self) -> None:
        waits = list(self._waits.values())
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
