"""What a drafting engine remembers of the requests that it drafts for: all of it disposable.

A session's tokens are the committed ones. Drafted tokens, and any KV, belong to the drafter.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from outrider.drafter_service.engine.drafter import Ask, SessionKey
from outrider.drafter_service.engine.state_buffer import StateBuffer
from outrider.verifier_service.messages.draft import Commit, Draft, DraftSampling, History, Open, States

SMOOTHING = 1 / 8  # gain of mean times, as TCP's retransmission timer uses it (RFC 6298)


@dataclass(slots=True)
class RunningMean:
    """A mean of which the latest values count most; None before the first."""

    value: float | None = None

    def observe(self, value: float) -> None:
        self.value = value if self.value is None else self.value + SMOOTHING * (value - self.value)


class Round(NamedTuple):
    """An unanswered ask, and the verifier's number of it."""

    ask: Ask  # its length is fixed before any token of the draft is drawn
    round_id: int
    asked_s: float
    in_columns: bool = False  # as it was asked for


@dataclass(slots=True)
class Session:
    """One request's committed tokens and, at most, one unanswered round."""

    key: SessionKey
    sampling: DraftSampling
    token_ids: list[int]
    last_used_s: float
    cache_salt: str = ""
    history: History | None = None
    round: Round | None = None
    states: StateBuffer = field(default_factory=StateBuffer)
    refusal: str | None = None  # why nothing can be drafted for it: its asks are answered by empty drafts
    answered_s: float | None = None  # when its last draft was; None: the verifier has come back since
    pause_s: RunningMean = field(default_factory=RunningMean)  # from an answer to what the verifier says next

    def take_pause(self, now_s: float) -> None:
        """Note how long the verifier took to come back after the last answer."""
        if self.answered_s is not None:
            self.pause_s.observe(now_s - self.answered_s)
            self.answered_s = None


class SessionObserver(Protocol):
    """What is told of sessions while the pool learns; it changes nothing of them."""

    def open(self, session: Session, message: Open) -> None:
        """Note a session that begins; an older one of the same key is replaced, and not told of by `drop`."""

    def take_state(self, session: Session, message: States) -> None:
        """Note the one state that the session has kept of a message: of drafters that read the last state alone."""

    def commit(self, session: Session, message: Commit) -> None:
        """Note tokens that the session has just got."""

    def answer(self, session: Session, ask: Ask, draft: Draft, *, was_ahead: bool) -> None:
        """Note an answer; `was_ahead`: it was drafted before it was asked for."""

    def close(self, session: Session) -> None:
        """Note that a verifier has closed a session that was not refused; `drop` follows."""

    def drop(self, session: Session) -> None:
        """Note the end of a session, whatever ended it."""

    def take_version(self, version: str) -> None:
        """Note that answers come from new weights from now on."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Raise `AssertionError` if anything is kept of a session that is not in `keys`."""


@dataclass(slots=True)
class SessionTable:
    """Sessions in the order of their last use, oldest first, at most `max_sessions`, forgotten after `ttl_s`."""

    max_sessions: int
    ttl_s: float
    _sessions: collections.OrderedDict[SessionKey, Session] = field(default_factory=collections.OrderedDict)

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._sessions

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def put(self, session: Session) -> None:
        """Add a session, or replace the one of the same key."""
        self._sessions[session.key] = session
        self._sessions.move_to_end(session.key)

    def touch(self, session: Session, now_s: float) -> None:
        session.last_used_s = now_s
        self._sessions.move_to_end(session.key)

    def remove(self, key: SessionKey) -> Session | None:
        return self._sessions.pop(key, None)

    def of_peer(self, peer: str) -> list[Session]:
        return [session for session in self._sessions.values() if session.key.peer == peer]

    def expired(self, now_s: float) -> list[Session]:
        """Return the sessions unused for `ttl_s`; one with an unanswered round is in use."""
        idle: list[Session] = []
        for session in self._sessions.values():
            if session.last_used_s + self.ttl_s > now_s:
                break  # in the order of last use: all that follow are younger
            if session.round is None:
                idle.append(session)
        return idle

    def surplus(self) -> list[Session]:
        """Return the sessions beyond `max_sessions`: the least recently used, those without an unanswered round first.

        A verifier with more than its share loses sessions before other verifiers do. The newest session is never
        returned: the others make room for it.
        """
        num_surplus = len(self._sessions) - self.max_sessions
        if num_surplus <= 0:
            return []
        num_of_peer = collections.Counter(key.peer for key in self._sessions)
        share = self.max_sessions / len(num_of_peer)
        older = list(self._sessions.values())[:-1]
        older.sort(key=lambda session: (num_of_peer[session.key.peer] <= share, session.round is not None))
        return older[:num_surplus]

    def surplus_states(self, max_bytes: int, *, spared: Session) -> list[Session]:
        """Return the least recently used sessions whose hidden states exceed `max_bytes`, in the order of `surplus`.

        `spared` is never returned: the others make room for it.
        """
        num_bytes = sum(session.states.num_bytes for session in self)
        others = [session for session in self if session is not spared and session.states.num_bytes]
        surplus: list[Session] = []
        for session in sorted(others, key=lambda session: session.round is not None):
            if num_bytes <= max_bytes:
                break
            num_bytes -= session.states.num_bytes
            surplus.append(session)
        return surplus

    def check_integrity(self) -> None:
        """Raise `AssertionError` if the table contradicts itself."""
        assert len(self._sessions) <= self.max_sessions, "more sessions than allowed"
        for key, session in self._sessions.items():
            assert session.key == key, "session under another's key"
            assert session.refusal is None or session.round is None, "a refused session waits for a draft"
        uses = [session.last_used_s for session in self._sessions.values()]
        assert uses == sorted(uses), "sessions are not in the order of their last use"


def in_turns(sessions: Iterable[Session]) -> list[Session]:
    """Return sessions with the first of every verifier before any verifier's second: none crowds out another."""
    sessions = list(sessions)
    if len({session.key.peer for session in sessions}) < 2:
        return sessions
    num_before: collections.Counter[str] = collections.Counter()
    turns: list[tuple[int, Session]] = []
    for session in sessions:
        turns.append((num_before[session.key.peer], session))
        num_before[session.key.peer] += 1
    return [session for _, session in sorted(turns, key=lambda turn: turn[0])]
