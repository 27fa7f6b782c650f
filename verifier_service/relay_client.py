"""A `DraftClient` whose drafters are at the far end of a pipe: another process, or a link that the shell holds."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.verifier_service.drafting import Draft, DrafterEvent, Resync, VerifierMessage
from outrider.verifier_service.engine_messages import PeerState, Relay
from outrider.verifier_service.wire import WireError, decode, encode


class RelayDraftClient:
    """Turn relayed frames into drafter events, and messages for drafters into frames to relay."""

    def __init__(self) -> None:
        self._events: list[DrafterEvent] = []
        self._outbox: list[Relay] = []
        self.num_bad_frames = 0

    def feed(self, message: Relay | PeerState) -> None:
        """Take in what the far end said; a frame that does not decode is counted and ends in a missed deadline."""
        if isinstance(message, PeerState):
            event = DrafterEvent(
                drafter_id=message.peer, is_up=message.is_up, vocab_size=message.vocab_size, needs=message.needs
            )
            self._events.append(event)
            return
        try:
            decoded = decode(message.payload, (Draft, Resync))
        except WireError:
            self.num_bad_frames += 1
            return
        self._events.append(DrafterEvent(drafter_id=message.peer, message=decoded, received_s=message.received_s))

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self._outbox.extend(Relay(peer=drafter_id, payload=encode(message)) for message in messages)

    def poll(self) -> list[DrafterEvent]:
        events, self._events = self._events, []
        return events

    def take_outbox(self) -> tuple[Relay, ...]:
        """Return, and forget, what is to be relayed to drafters."""
        relays, self._outbox = tuple(self._outbox), []
        return relays
