"""An engine's handovers, in both directions, as its loop sees them."""

from __future__ import annotations

from typing import NamedTuple

from outrider.verifier_service.handover.giver import Giver
from outrider.verifier_service.handover.taker import Taken, Taker
from outrider.verifier_service.messages.handover import EndTake, GivenFrame, PartsRead, TakeKV, TakenFrame
from outrider.verifier_service.messages.request import RequestOutput


class Pumped(NamedTuple):
    """What has come about since the last time."""

    given: list[GivenFrame]
    taken: list[Taken]
    failed: list[RequestOutput]


class Handovers:
    """The giver and the taker of one engine. Call everything between two steps."""

    def __init__(self, giver: Giver, taker: Taker) -> None:
        self.giver, self.taker = giver, taker

    @property
    def is_busy(self) -> bool:
        """Whether `pump` should be called again soon: a message will not wake the engine."""
        return self.giver.is_behind or self.taker.awaits_tensors

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

    def pump(self) -> Pumped:
        """Send what was computed for takers, and return what has come."""
        return Pumped(self.giver.pump(), *self.taker.pump())

    def close(self) -> None:
        """Close all channels."""
        self.giver.close()
        self.taker.close()
