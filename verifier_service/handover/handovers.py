"""An engine's handovers, in both directions, as the engine and its loop see them; or none."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from outrider.verifier_service.handover.giver import Giver
from outrider.verifier_service.handover.taker import Taken, Taker
from outrider.verifier_service.messages.counts import HandoverCounts
from outrider.verifier_service.messages.handover import EndTake, GivenFrame, PartsRead, PullKV, TakeKV, TakenFrame
from outrider.verifier_service.messages.request import GenerationRequest, Request, RequestOutput


class HandoverProgress(NamedTuple):
    """What has come about since the last time."""

    given: list[GivenFrame]
    taken: list[Taken]
    failed: list[RequestOutput]


class Handovers(Protocol):
    """How requests come from and go to other verifiers with their KV. Call everything between two steps."""

    @property
    def can_give(self) -> bool: ...

    @property
    def is_busy(self) -> bool:
        """Whether `pump` should be called again soon: a message will not wake the engine."""
        ...

    @property
    def num_coming(self) -> int:
        """How many requests' KV is on its way."""
        ...

    def begin(self, message: GenerationRequest) -> RequestOutput | None:
        """Ask for a request's KV where it is; return the only output of one that cannot be taken."""
        ...

    def handle(self, message: TakeKV | EndTake | PartsRead | TakenFrame) -> None:
        """Take a message of another verifier, or of one's own shell about it."""

    def pump(self) -> HandoverProgress:
        """Send what was computed for takers, and return what has come."""
        ...

    def drop(self, request_id: str) -> None:
        """Forget a request that was cancelled, if it is on its way or waits for blocks."""

    def write(self, request: Request, start: int) -> None:
        """Write the KV that a request has brought to its blocks, from a position on."""

    def release(self, request: Request) -> None:
        """Drop the KV that a request has brought, if it is still on the host."""

    def take_calls(self) -> tuple[PullKV, ...]:
        """Return and clear what the shell is to call, or to hang up."""
        ...

    def counters(self) -> HandoverCounts: ...

    def close(self) -> None:
        """Close all channels."""


class NoHandovers:
    """Handovers of an engine whose KV stays where it is: nothing is given, and what comes with KV is refused."""

    can_give = is_busy = False
    num_coming = 0

    def begin(self, message: GenerationRequest) -> RequestOutput | None:
        return RequestOutput.not_taken(message.request_id, "this engine takes no KV of others")

    def handle(self, message: TakeKV | EndTake | PartsRead | TakenFrame) -> None: ...

    def pump(self) -> HandoverProgress:
        return HandoverProgress([], [], [])

    def drop(self, request_id: str) -> None: ...

    def write(self, request: Request, start: int) -> None:
        raise AssertionError(f"KV of {request.request_id} came, and nobody took it")

    def release(self, request: Request) -> None: ...

    def take_calls(self) -> tuple[PullKV, ...]:
        return ()

    def counters(self) -> HandoverCounts:
        return HandoverCounts()

    def close(self) -> None: ...


class KVHandovers:
    """The giver and the taker of one engine."""

    can_give = True

    def __init__(self, giver: Giver, taker: Taker) -> None:
        self.giver, self.taker = giver, taker

    @property
    def is_busy(self) -> bool:
        return self.giver.is_behind or self.taker.awaits_tensors

    @property
    def num_coming(self) -> int:
        return len(self.taker)

    def begin(self, message: GenerationRequest) -> RequestOutput | None:
        self.taker.begin(message)
        return None

    def drop(self, request_id: str) -> None:
        self.taker.drop(request_id)

    def write(self, request: Request, start: int) -> None:
        self.taker.write(request, start)

    def release(self, request: Request) -> None:
        self.taker.release(request)

    def take_calls(self) -> tuple[PullKV, ...]:
        return self.taker.take_calls()

    def handle(self, message: TakeKV | EndTake | PartsRead | TakenFrame) -> None:
        match message:
            case TakeKV():
                self.giver.take(message)
            case EndTake(take_id=take_id):
                self.giver.end(take_id)
            case PartsRead(take_id=take_id, num_bytes=num_bytes):
                self.giver.read(take_id, num_bytes)
            case TakenFrame():
                self.taker.feed(message)

    def pump(self) -> HandoverProgress:
        return HandoverProgress(self.giver.pump(), *self.taker.pump())

    def counters(self) -> HandoverCounts:
        giver = self.giver
        return HandoverCounts(giver.num_given, giver.num_bytes, dict(giver.refusals), self.taker.num_taken)

    def close(self) -> None:
        self.giver.close()
        self.taker.close()
