"""A `DraftClient` whose drafters are at the far end of a pipe: another process, or a link that the shell holds."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.verifier_service.drafting import Draft, DrafterEvent, Resync, States, VerifierMessage
from outrider.verifier_service.engine_messages import PeerState, Relay
from outrider.verifier_service.tensor_channel import ChannelLimits, TensorSender, as_tensor
from outrider.verifier_service.tensor_route import GRPC, TensorRoute
from outrider.verifier_service.wire import WireError, decode, encode

# On one machine a frame was faster up to some 600 KiB, the channel from there on (4 MiB: 4.7 ms instead of 10.6, of
# which the step loop spends 0.7 instead of 5.9): so what a round brings goes in its frame, what a prompt brings beside.
MIN_TENSOR_BYTES = 512 << 10


def open_sender(route: TensorRoute) -> TensorSender:
    """Open a channel for the states that are worth it."""
    return TensorSender(route, ChannelLimits(min_tensor_bytes=MIN_TENSOR_BYTES))


class RelayDraftClient:
    """Turn relayed frames into drafter events, and messages for drafters into frames to relay.

    Where a link has a channel for hidden states beside it, they go through that from here, and the frame only names
    them. A channel that is not there yet, is full or has failed costs nothing but bytes in the frame.
    """

    def __init__(self, open_: Callable[[TensorRoute], TensorSender] = open_sender) -> None:
        self._open_sender = open_
        self._senders: dict[str, TensorSender] = {}
        self._events: list[DrafterEvent] = []
        self._outbox: list[Relay] = []
        self.num_bad_frames = 0
        self.num_state_bytes: collections.Counter[str] = collections.Counter()  # sent, by transport
        self.num_tensor_fallbacks = 0  # states that went as bytes for their channel was full or had failed

    def feed(self, message: Relay | PeerState) -> None:
        """Take in what the far end said; a frame that does not decode is counted and ends in a missed deadline."""
        if isinstance(message, PeerState):
            self._renew_channel(message)
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
        if isinstance(decoded, Resync) and decoded.lost_tensors and message.peer in self._senders:
            self._senders[message.peer].close()
        self._events.append(DrafterEvent(drafter_id=message.peer, message=decoded, received_s=message.received_s))

    def _renew_channel(self, state: PeerState) -> None:
        """Every connection of a link has a channel of its own: what the last one failed at is over."""
        if (old := self._senders.pop(state.peer, None)) is not None:
            old.close()
        if state.is_up and state.tensors is not None:
            self._senders[state.peer] = self._open_sender(state.tensors)

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        for message in messages:
            framed = self._framed(drafter_id, message) if isinstance(message, States) else message
            self._outbox.append(Relay(peer=drafter_id, payload=encode(framed)))

    def _framed(self, drafter_id: str, message: States) -> States:
        """Let the states go through the drafter's channel, where that takes them now; return what the frame says."""
        sender, num_bytes = self._senders.get(drafter_id), len(message.data)
        number = None if sender is None else sender.offer(as_tensor(message.data))
        if sender is None or number is None:
            self.num_tensor_fallbacks += sender is not None and sender.is_refusing(num_bytes)
            self.num_state_bytes[GRPC] += num_bytes
            return message
        self.num_state_bytes[sender.route.transport] += num_bytes
        return replace(message, data=b"", tensor=number, num_bytes=num_bytes, channel=sender.route.group)

    def poll(self) -> list[DrafterEvent]:
        events, self._events = self._events, []
        return events

    def take_outbox(self) -> tuple[Relay, ...]:
        """Return, and forget, what is to be relayed to drafters."""
        relays, self._outbox = tuple(self._outbox), []
        return relays

    def close(self) -> None:
        """Let go of the channels."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
