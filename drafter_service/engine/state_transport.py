"""Where messages wait for hidden states that come beside their link, session by session.

The frame that names a tensor and the tensor itself travel different ways, so either may be first. What a verifier says
of one request must be taken in in order: a frame whose tensor is not there yet holds back the later frames of its own
session, and of no other. A new `Open` or a `Close` makes what is held pointless. When a channel fails, or a tensor is
too late, every session that waits is resynced, and its states come as bytes.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import socket
from dataclasses import dataclass, replace
from typing import cast

from outrider.drafter_service.engine.drafter import SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.verifier_service.links.tensor_channel import (
    ChannelLimits,
    OpenPair,
    TensorReceiver,
    TensorStore,
    open_pair,
)
from outrider.verifier_service.messages.draft import Close, Commit, Commits, Open, Seed, States, VerifierMessage
from outrider.verifier_service.messages.tensor_route import TensorRoute


@dataclass(slots=True)
class _Held:
    """A message of one session that waits, for its own tensor or for that of one before it."""

    message: Open | Seed | States | Commit | Close
    tensor: int = 0  # that it waits for; 0: none


class StateTransport:
    """The receiving ends of all channels to this drafter, in front of its engine. All calls belong to one thread."""

    def __init__(
        self,
        engine: DraftEngine,
        store: TensorStore | None = None,
        limits: ChannelLimits | None = None,
        *,
        open_: OpenPair = open_pair,
    ) -> None:
        """Without a `store` there are no channels, and messages go straight to the engine."""
        self._engine, self._store, self._limits, self._open = engine, store, limits, open_
        self._receivers: dict[str, TensorReceiver] = {}
        self._held: dict[SessionKey, collections.deque[_Held]] = {}
        self._near, self._far = socket.socketpair()
        for end in (self._near, self._far):
            end.setblocking(False)

    def fileno(self) -> int:
        """Return what becomes readable when `collect` has something to do."""
        return self._near.fileno()

    @property
    def num_held(self) -> int:
        return sum(map(len, self._held.values()))

    def open(self, peer: str, route: TensorRoute) -> None:
        """Begin to wait for a verifier at the other end of a channel."""
        assert self._store is not None, "a channel without a store to meet at"
        self.close_peer(peer)
        self._receivers[peer] = TensorReceiver(route, self._store, self._wake, self._limits, open_=self._open)

    def close_peer(self, peer: str) -> None:
        """Forget a peer, its channel and what it said that still waits."""
        if (receiver := self._receivers.pop(peer, None)) is not None:
            receiver.close()
        for key in self._sessions_of(peer):
            del self._held[key]

    def handle(self, peer: str, message: VerifierMessage) -> None:
        """Hand a message on to the engine, now or when the states before it have come."""
        if isinstance(message, Commits):
            self._handle_commits(peer, message)
            return
        key = SessionKey(peer, message.request_id)
        if isinstance(message, Open | Close):
            self._held.pop(key, None)
        if isinstance(message, States) and message.tensor:
            receiver = self._receivers.get(peer)
            if receiver is not None and receiver.route.group != message.channel:
                self._held.pop(key, None)  # said of a channel that is gone: its tensor will not come
                self._engine.resync(key)
                return
            self._held.setdefault(key, collections.deque()).append(_Held(message, message.tensor))
            if receiver is None or not receiver.expect(message.tensor, message.num_bytes):
                self._lose_channel(peer)
        elif key in self._held:
            self._held[key].append(_Held(message))
        else:
            self._engine.handle(peer, message)

    def _handle_commits(self, peer: str, frame: Commits) -> None:
        """Hand on the rows of sessions that nothing is held of; the others wait one by one."""
        waiting = [SessionKey(peer, request_id) in self._held for request_id in frame.request_ids]
        if not any(waiting):
            self._engine.handle(peer, frame)
            return
        if not all(waiting):
            self._engine.handle(peer, frame.take([row for row, waits in enumerate(waiting) if not waits]))
        for commit in itertools.compress(frame.commits(), waiting):
            self.handle(peer, commit)

    def collect(self) -> None:
        """Take in the tensors that have arrived, and let go on what waited for them."""
        with contextlib.suppress(BlockingIOError):
            while self._near.recv(4096):
                pass
        for peer, receiver in list(self._receivers.items()):
            has_failed = receiver.failure is not None  # read first: what arrived before that is then all there
            arrived = {number: cast(bytes, tensor.numpy().data) for number, tensor in receiver.arrived()}
            if arrived:
                self._match(peer, arrived)
            if has_failed:
                self._lose_channel(peer)

    def close(self) -> None:
        """Close every channel."""
        for peer in list(self._receivers):
            self.close_peer(peer)
        self._near.close()
        self._far.close()

    def _match(self, peer: str, arrived: dict[int, bytes]) -> None:
        """Give the tensors to the messages that name them; those that nothing waits for any more are dropped."""
        for key in self._sessions_of(peer):
            for held in self._held[key]:
                if held.tensor in arrived:
                    assert isinstance(held.message, States)
                    whole = replace(held.message, data=arrived[held.tensor], tensor=0, num_bytes=0, channel="")
                    held.message, held.tensor = whole, 0
            self._let_go_on(key)

    def _let_go_on(self, key: SessionKey) -> None:
        held = self._held[key]
        while held and not held[0].tensor:
            self._engine.handle(key.peer, held.popleft().message)
        if not held:
            del self._held[key]

    def _lose_channel(self, peer: str) -> None:
        """Resync every session that waits for it; the verifier is told to send bytes."""
        waiting = self._sessions_of(peer)
        if (receiver := self._receivers.pop(peer, None)) is not None:
            receiver.close()
        for key in waiting:
            del self._held[key]
            self._engine.resync(key, lost_tensors=True)

    def _sessions_of(self, peer: str) -> list[SessionKey]:
        return [key for key in self._held if key.peer == peer]

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: nobody sleeps any more
            self._far.send(b"\0")
