"""A `DraftClient` whose drafters are at the far end of a pipe: another process, or a link that the shell holds."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from outrider.verifier_service.drafting import Close, Commit, Draft, DrafterEvent, Resync, States, VerifierMessage
from outrider.verifier_service.engine_messages import PeerState, Relay
from outrider.verifier_service.state_ways import StateWays
from outrider.verifier_service.tensor_channel import TensorSender, as_tensor
from outrider.verifier_service.tensor_route import GRPC, TensorRoute
from outrider.verifier_service.wire import WireError, decode, encode


class Ways(Protocol):
    """Chooses a message's way; see `StateWays`."""

    def takes_channel(self, num_bytes: int) -> bool:
        """Return whether states of so many bytes should go through the channel."""

    def observe(self, num_bytes: int, seconds: float, *, by_channel: bool) -> None:
        """Take in a round trip."""


@dataclass(slots=True)
class _Said:
    """What a request's drafter was told of its states since its last round was asked for."""

    num_bytes: int = 0
    transports: set[str] = field(default_factory=set)
    round_id: int | None = None  # None: nothing was asked for yet
    asked_s: float = 0.0


class RelayDraftClient:
    """Turn relayed frames into drafter events, and messages for drafters into frames to relay.

    Where a link has a channel for hidden states beside it, they go through that from here where it has been the faster
    way, and the frame only names them. A channel that is not there yet, is full or has failed costs nothing but bytes
    in the frame.
    """

    def __init__(
        self,
        open_: Callable[[TensorRoute], TensorSender] = TensorSender,
        *,
        make_ways: Callable[[], Ways] = StateWays,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_ways`: for every connection of a link that has a channel; `clock`: that of `Relay.received_s`."""
        self._open_sender = open_
        self._make_ways = make_ways
        self._clock = clock
        self._senders: dict[str, TensorSender] = {}
        self._ways: dict[str, Ways] = {}  # of the same drafters
        self._said: dict[tuple[str, str], _Said] = {}  # by drafter and request
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
        if isinstance(decoded, Draft):
            self._observe_round(message.peer, decoded, message.received_s)
        self._events.append(DrafterEvent(drafter_id=message.peer, message=decoded, received_s=message.received_s))

    def _renew_channel(self, state: PeerState) -> None:
        """Every connection of a link has a channel of its own: what the last one failed at is over."""
        if (old := self._senders.pop(state.peer, None)) is not None:
            old.close()
        self._ways.pop(state.peer, None)
        self._said = {key: said for key, said in self._said.items() if key[0] != state.peer}
        if state.is_up and state.tensors is not None:
            self._senders[state.peer] = self._open_sender(state.tensors)
            self._ways[state.peer] = self._make_ways()

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        has_channel = drafter_id in self._senders
        for message in messages:
            framed = self._framed(drafter_id, message) if isinstance(message, States) else message
            self._outbox.append(Relay(peer=drafter_id, payload=encode(framed)))
            if has_channel and isinstance(message, Commit | Close):
                self._note_asked(drafter_id, message)

    def _note_asked(self, drafter_id: str, message: Commit | Close) -> None:
        """Remember when a round was asked for that brought states; without any it says nothing of ways."""
        key = (drafter_id, message.request_id)
        said = self._said.get(key)
        if said is None:
            return
        if isinstance(message, Close) or said.round_id is not None or not message.max_length:
            del self._said[key]
            return
        said.round_id, said.asked_s = message.round_id, self._clock()

    def _observe_round(self, drafter_id: str, draft: Draft, received_s: float | None) -> None:
        said = self._said.get((drafter_id, draft.request_id))
        if said is None or said.round_id != draft.round_id:
            return
        del self._said[drafter_id, draft.request_id]
        if len(said.transports) == 1:
            seconds = (self._clock() if received_s is None else received_s) - said.asked_s
            self._ways[drafter_id].observe(said.num_bytes, seconds, by_channel=GRPC not in said.transports)

    def _framed(self, drafter_id: str, message: States) -> States:
        """Let the states go the faster way, where that takes them now; return what the frame says."""
        sender, num_bytes = self._senders.get(drafter_id), len(message.data)
        if sender is None:
            self.num_state_bytes[GRPC] += num_bytes
            return message
        said = self._said.get((drafter_id, message.request_id))
        if said is None or said.round_id is not None:
            said = self._said[drafter_id, message.request_id] = _Said()
        said.num_bytes += num_bytes
        wants_channel = self._ways[drafter_id].takes_channel(num_bytes)
        number = sender.offer(as_tensor(message.data)) if wants_channel else None
        transport = GRPC if number is None else sender.route.transport
        said.transports.add(transport)
        self.num_state_bytes[transport] += num_bytes
        if number is None:
            self.num_tensor_fallbacks += wants_channel and sender.is_refusing
            return message
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
