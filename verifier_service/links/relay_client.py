"""A `DraftClient` over a pipe: its drafters are in another process, or behind links that the shell keeps."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.verifier_service.links.state_ways import StateWays
from outrider.verifier_service.links.tensor_channel import TensorSender, as_tensor
from outrider.verifier_service.messages.draft import (
    Close,
    Commit,
    Commits,
    Draft,
    DrafterEvent,
    Drafts,
    Resync,
    States,
    VerifierMessage,
    each_commit,
    each_draft,
)
from outrider.verifier_service.messages.engine import LinkEvent, PeerState, PeerWeights, Relay
from outrider.verifier_service.messages.link import DRAFTER_MESSAGES
from outrider.verifier_service.messages.tensor_route import GRPC, TensorRoute
from outrider.verifier_service.messages.wire import WireError, decode, encode

logger = logging.getLogger(__name__)


class Ways(Protocol):
    """Chooses frames or channel for a round's hidden states; see `StateWays`."""

    def choose_channel(self, num_bytes: int) -> bool:
        """Return whether a round's states should go through the channel."""

    def observe(self, num_bytes: int, seconds: float, *, by_channel: bool) -> None:
        """Learn from a round trip."""


@dataclass(slots=True)
class _SentStates:
    """The states that were sent for one request's next round."""

    num_bytes: int
    by_channel: bool
    sent_s: float
    is_mixed: bool = False  # the channel did not take all of them
    round_id: int | None = None  # None: the round is not asked for yet


class RelayDraftClient:
    """Turns relayed frames into drafter events, and messages for drafters into frames to relay.

    If a link has a tensor channel, hidden states go through it whenever it has been faster than frames; the frame then
    only names the tensor. If the channel is not connected yet, is full or has failed, states go as bytes in the frame.
    """

    def __init__(
        self,
        open_: Callable[[TensorRoute], TensorSender] = TensorSender,
        *,
        make_ways: Callable[[], Ways] = StateWays,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make_ways` is called for every connection with a channel; `clock` is that of `Relay.received_s`."""
        self._open_sender = open_
        self._make_ways = make_ways
        self._clock = clock
        self._senders: dict[str, TensorSender] = {}
        self._ways: dict[str, Ways] = {}  # of the same drafters
        self._sent: dict[tuple[str, str], _SentStates] = {}  # by drafter and request
        self._events: list[DrafterEvent] = []
        self._outbox: list[Relay] = []
        self.num_bad_frames = 0
        self._known_bad: set[str] = set()  # drafters that sent a malformed frame on their present connection
        self.num_state_bytes: collections.Counter[str] = collections.Counter()  # sent, by transport
        self.num_tensor_fallbacks = 0  # messages that carry states as bytes: the channel was full or had failed

    def feed(self, message: LinkEvent) -> None:
        """Handle a message of the far end. A malformed frame is counted and dropped: its round misses its deadline."""
        if isinstance(message, PeerState):
            self._renew_channel(message)
            event = DrafterEvent(
                drafter_id=message.peer, is_up=message.is_up, vocab_size=message.vocab_size, needs=message.needs
            )
            self._events.append(event)
            return
        if isinstance(message, PeerWeights):
            self._events.append(DrafterEvent(drafter_id=message.peer, weight_version=message.weight_version))
            return
        try:
            decoded = decode(message.payload, DRAFTER_MESSAGES)
        except WireError as error:
            self.num_bad_frames += 1
            if message.peer not in self._known_bad:  # log once: this is the step loop's process
                self._known_bad.add(message.peer)
                logger.warning("malformed frames from drafter %s are dropped: %s", message.peer, error)
            return
        if isinstance(decoded, Resync) and decoded.lost_tensors and message.peer in self._senders:
            self._senders[message.peer].close()
        if isinstance(decoded, Draft | Drafts) and message.peer in self._senders:
            for draft in each_draft(decoded):
                self._observe_round(message.peer, draft, message.received_s)
        self._events.append(DrafterEvent(drafter_id=message.peer, message=decoded, received_s=message.received_s))

    def _renew_channel(self, state: PeerState) -> None:
        """Replace the channel of the last connection: each connection has its own."""
        if (old := self._senders.pop(state.peer, None)) is not None:
            old.close()
        self._ways.pop(state.peer, None)
        self._known_bad.discard(state.peer)
        self._sent = {key: sent for key, sent in self._sent.items() if key[0] != state.peer}
        if state.is_up and state.tensors is not None:
            self._senders[state.peer] = self._open_sender(state.tensors)
            self._ways[state.peer] = self._make_ways()

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        has_channel = drafter_id in self._senders
        if has_channel:
            self._choose_ways(drafter_id, messages)
        for message in messages:
            framed = self._offer_states(drafter_id, message) if isinstance(message, States) else message
            self._outbox.append(Relay(peer=drafter_id, payload=encode(framed)))
            if has_channel and isinstance(message, Commit | Commits | Close):
                for one in (message,) if isinstance(message, Close) else each_commit(message):
                    self._note_asked(drafter_id, one)

    def _choose_ways(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        """Choose frames or channel for all states of each request's next round."""
        num_bytes: collections.Counter[str] = collections.Counter()
        for message in messages:
            if isinstance(message, States):
                num_bytes[message.request_id] += len(message.data)
        for request_id, total in num_bytes.items():
            self._give_up(drafter_id, request_id)
            by_channel = self._ways[drafter_id].choose_channel(total)
            self._sent[drafter_id, request_id] = _SentStates(total, by_channel, self._clock())

    def _note_asked(self, drafter_id: str, message: Commit | Close) -> None:
        """Note the round that the states were sent for, so that its draft times their way."""
        sent = self._sent.get((drafter_id, message.request_id))
        if sent is None:
            return
        if isinstance(message, Close):
            del self._sent[drafter_id, message.request_id]
        elif sent.round_id is not None or not message.max_length:
            self._give_up(drafter_id, message.request_id)
        else:
            sent.round_id = message.round_id

    def _give_up(self, drafter_id: str, request_id: str) -> None:
        """Stop waiting for a round's draft; count the time that has passed as its round trip."""
        sent = self._sent.pop((drafter_id, request_id), None)
        if sent is not None and sent.round_id is not None:
            self._observe_way(drafter_id, sent, self._clock())

    def _observe_round(self, drafter_id: str, draft: Draft, received_s: float | None) -> None:
        sent = self._sent.get((drafter_id, draft.request_id))
        if sent is not None and sent.round_id == draft.round_id:
            del self._sent[drafter_id, draft.request_id]
            self._observe_way(drafter_id, sent, self._clock() if received_s is None else received_s)

    def _observe_way(self, drafter_id: str, sent: _SentStates, ended_s: float) -> None:
        if not sent.is_mixed:
            self._ways[drafter_id].observe(sent.num_bytes, ended_s - sent.sent_s, by_channel=sent.by_channel)

    def _offer_states(self, drafter_id: str, message: States) -> States:
        """Offer the states to the channel if it was chosen; return the message for the frame, without data if taken."""
        num_bytes, sent = len(message.data), self._sent.get((drafter_id, message.request_id))
        if sent is not None and sent.by_channel:
            sender = self._senders[drafter_id]
            number = sender.offer(as_tensor(message.data))
            if number is not None:
                self.num_state_bytes[sender.route.transport] += num_bytes
                return replace(message, data=b"", tensor=number, num_bytes=num_bytes, channel=sender.route.group)
            sent.is_mixed = True
            self.num_tensor_fallbacks += sender.is_refusing
        self.num_state_bytes[GRPC] += num_bytes
        return message

    def poll(self) -> list[DrafterEvent]:
        events, self._events = self._events, []
        return events

    def take_outbox(self) -> tuple[Relay, ...]:
        """Return and clear the frames for drafters."""
        relays, self._outbox = tuple(self._outbox), []
        return relays

    def close(self) -> None:
        """Close all channels."""
        for sender in self._senders.values():
            sender.close()
        self._senders.clear()
