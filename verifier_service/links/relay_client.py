"""A `DraftClient` whose drafters are at the far end of a pipe: another process, or a link that the shell holds."""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from outrider.verifier_service.links.state_ways import StateWays
from outrider.verifier_service.links.tensor_channel import TensorSender, as_tensor
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DrafterEvent, Resync, States, VerifierMessage
from outrider.verifier_service.messages.engine import PeerState, Relay
from outrider.verifier_service.messages.link import DRAFTER_MESSAGES
from outrider.verifier_service.messages.tensor_route import GRPC, TensorRoute
from outrider.verifier_service.messages.wire import WireError, decode, encode

logger = logging.getLogger(__name__)


class Ways(Protocol):
    """Chooses a round's way; see `StateWays`."""

    def takes_channel(self, num_bytes: int) -> bool:
        """Return whether states of so many bytes should go through the channel."""

    def observe(self, num_bytes: int, seconds: float, *, by_channel: bool) -> None:
        """Take in a round trip."""


@dataclass(slots=True)
class _Said:
    """The states that a drafter was told of one request, for its next round."""

    num_bytes: int
    by_channel: bool
    said_s: float
    is_mixed: bool = False  # the channel did not take all of them
    round_id: int | None = None  # None: nothing was asked for yet


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
        self._known_bad: set[str] = set()  # drafters whose present connection has brought a malformed frame
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
            decoded = decode(message.payload, DRAFTER_MESSAGES)
        except WireError as error:
            self.num_bad_frames += 1
            if message.peer not in self._known_bad:  # in the step loop's process: one line says it
                self._known_bad.add(message.peer)
                logger.warning("malformed frames from drafter %s are dropped: %s", message.peer, error)
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
        self._known_bad.discard(state.peer)
        self._said = {key: said for key, said in self._said.items() if key[0] != state.peer}
        if state.is_up and state.tensors is not None:
            self._senders[state.peer] = self._open_sender(state.tensors)
            self._ways[state.peer] = self._make_ways()

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        has_channel = drafter_id in self._senders
        if has_channel:
            self._choose_ways(drafter_id, messages)
        for message in messages:
            framed = self._framed(drafter_id, message) if isinstance(message, States) else message
            self._outbox.append(Relay(peer=drafter_id, payload=encode(framed)))
            if has_channel and isinstance(message, Commit | Close):
                self._note_asked(drafter_id, message)

    def _choose_ways(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        """Choose a way for all states that are said of a request before its round is asked for."""
        num_bytes: collections.Counter[str] = collections.Counter()
        for message in messages:
            if isinstance(message, States):
                num_bytes[message.request_id] += len(message.data)
        for request_id, total in num_bytes.items():
            self._give_up(drafter_id, request_id)
            by_channel = self._ways[drafter_id].takes_channel(total)
            self._said[drafter_id, request_id] = _Said(total, by_channel, self._clock())

    def _note_asked(self, drafter_id: str, message: Commit | Close) -> None:
        """Remember which round the states were for; a round without any says nothing of ways."""
        said = self._said.get((drafter_id, message.request_id))
        if said is None:
            return
        if isinstance(message, Close):
            del self._said[drafter_id, message.request_id]
        elif said.round_id is not None or not message.max_length:
            self._give_up(drafter_id, message.request_id)
        else:
            said.round_id = message.round_id

    def _give_up(self, drafter_id: str, request_id: str) -> None:
        """Go on without an answer: it would have taken at least as long as has passed."""
        said = self._said.pop((drafter_id, request_id), None)
        if said is not None and said.round_id is not None:
            self._observe_way(drafter_id, said, self._clock())

    def _observe_round(self, drafter_id: str, draft: Draft, received_s: float | None) -> None:
        said = self._said.get((drafter_id, draft.request_id))
        if said is not None and said.round_id == draft.round_id:
            del self._said[drafter_id, draft.request_id]
            self._observe_way(drafter_id, said, self._clock() if received_s is None else received_s)

    def _observe_way(self, drafter_id: str, said: _Said, ended_s: float) -> None:
        if not said.is_mixed:
            self._ways[drafter_id].observe(said.num_bytes, ended_s - said.said_s, by_channel=said.by_channel)

    def _framed(self, drafter_id: str, message: States) -> States:
        """Let the states go the way that was chosen, where that takes them now; return what the frame says."""
        num_bytes, said = len(message.data), self._said.get((drafter_id, message.request_id))
        if said is not None and said.by_channel:  # so there is one
            sender = self._senders[drafter_id]
            number = sender.offer(as_tensor(message.data))
            if number is not None:
                self.num_state_bytes[sender.route.transport] += num_bytes
                return replace(message, data=b"", tensor=number, num_bytes=num_bytes, channel=sender.route.group)
            said.is_mixed = True
            self.num_tensor_fallbacks += sender.is_refusing
        self.num_state_bytes[GRPC] += num_bytes
        return message

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
