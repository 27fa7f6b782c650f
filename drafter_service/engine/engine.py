"""The drafting engine: sessions of many verifiers, one batched step over all of their asks.

It knows nothing of processes, sockets or event loops: messages come in through `handle`, drafts go out of `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from outrider.drafter_service.engine.forward_cost import ForwardCost
from outrider.drafter_service.engine.sessions import (
    SMOOTHING,
    Session,
    SessionKey,
    SessionTable,
    UnansweredRound,
    first_bad_token,
    in_turns,
    known_prefix,
)
from outrider.drafter_service.engine.spare_time import MAX_AHEAD_TOKENS, RunsAhead, SpareTime
from outrider.drafter_service.engine.state_buffer import StateBuffer, UnusableStatesError
from outrider.verifier_service.messages.draft import (
    Close,
    Commit,
    Draft,
    DrafterMessage,
    DraftNeeds,
    DraftSampling,
    Open,
    Resync,
    SparseRow,
    States,
    VerifierMessage,
)
from outrider.verifier_service.messages.drafter_load import DrafterCounters, DrafterLoad
from outrider.verifier_service.messages.link import MAX_REQUEST_ID_CHARS, VERIFIER_MESSAGES, peek_request_id
from outrider.verifier_service.messages.wire import WireError, decode, encode

_GREEDY = DraftSampling(temperature=0.0)


@dataclass(slots=True, kw_only=True)  # this and the answer are made for each request and round: not frozen
class Ask:
    """Draft `length` tokens after `token_ids`; a new `ask_id` for a session replaces its older ask."""

    key: SessionKey
    ask_id: int  # unique within the engine; a verifier's round ids are its own affair
    token_ids: Sequence[int]  # committed; the session's own list, to be read only
    sampling: DraftSampling
    length: int  # at least 1; of a tree: its depth
    max_nodes: int = 0  # a tree of so many tokens; 0: a chain
    cache_salt: str = ""  # sessions of different salts share nothing
    states: torch.Tensor | None = None  # [num_states, width] of the first tokens; of the last one alone if so needed
    predicted_ids: Sequence[int] = ()  # as in `Commit`
    forced_ids: Sequence[int] = ()  # as in `Commit`


@dataclass(slots=True, kw_only=True)
class DraftResult:
    """The complete answer to an ask; fewer tokens than `length` only where they are point masses, or none at all."""

    key: SessionKey
    ask_id: int
    token_ids: tuple[int, ...]
    draft_probs: tuple[SparseRow, ...] | None = None  # this and what follows as in `Draft`
    parents: tuple[int, ...] | None = None
    confidences: tuple[float, ...] | None = None


class Drafter(Protocol):
    """Anything that drafts: one signature for models, heads, n-grams."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def needs(self) -> DraftNeeds: ...

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[DraftResult]:
        """Advance the asks by one batched step of at most `max_num_tokens` tokens.

        They come in turns of their verifiers, each one's oldest first and the oldest of all before any other. Returns
        those that became complete. The others are passed again, so that new asks join a running batch. Every call makes
        progress on at least one ask.
        """

    def release(self, key: SessionKey) -> None:
        """Forget whatever is kept for a session; unknown keys are no error."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Raise `AssertionError` if its own state is inconsistent, or holds anything for a session not in `keys`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEngineConfig:
    """Limits of one drafter."""

    max_sessions: int = 256
    session_ttl_s: float = 300.0
    max_num_batched_tokens: int = 512
    max_draft_length: int = 16
    max_tree_nodes: int = 64
    max_state_bytes: int = 4 << 30  # of the target's hidden states, all sessions together
    drafts_greedily: bool = False  # whatever the request's sampling, as point masses

    def __post_init__(self) -> None:
        if min(self.max_sessions, self.max_num_batched_tokens, self.max_draft_length) < 1 or self.session_ttl_s <= 0:
            raise ValueError("max_sessions, session_ttl_s, max_num_batched_tokens, max_draft_length must be positive")
        if min(self.max_tree_nodes, self.max_state_bytes) < 0:
            raise ValueError("max_tree_nodes and max_state_bytes must be 0 or positive")


class DraftEngine:
    """Continuous batching over every session of every verifier."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        clock: Callable[[], float],
        config: DraftEngineConfig,
        ahead: RunsAhead | None = None,
        cost: ForwardCost | None = None,
    ) -> None:
        """`ahead` is the drafter itself where it runs ahead: whoever drives the engine gives it its spare time.

        `cost` is that of its forwards; None: they are timed as they come.
        """
        self.vocab_size, self.max_model_len, self.needs = drafter.vocab_size, drafter.max_model_len, drafter.needs
        self.counters = DrafterCounters()
        self._drafter = drafter
        cost = ForwardCost(clock) if cost is None else cost
        self._spare_time = SpareTime(ahead, cost=cost, counters=self.counters)
        self._clock = clock
        self._config = config
        self._sessions = SessionTable(max_sessions=config.max_sessions, ttl_s=config.session_ttl_s)
        self._asked: dict[SessionKey, Session] = {}  # sessions with an unanswered round, oldest round first
        self._outbox: list[tuple[str, DrafterMessage]] = []
        self._num_asks = 0
        self._mean_draft_s: float | None = None

    @property
    def config(self) -> DraftEngineConfig:
        return self._config

    def handle(self, peer: str, message: VerifierMessage) -> None:
        """Take in one message of a peer (one connection of one verifier incarnation)."""
        key = SessionKey(peer, message.request_id)
        match message:
            case Open():
                self._open(key, message)
            case States():
                self._take_states(key, message)
            case Commit():
                self._commit(key, message)
            case Close():
                self._drop(key)

    def resync(self, key: SessionKey, *, lost_tensors: bool = False) -> None:
        """Give a session up and ask for all of it again."""
        self._ask_for_resync(key, lost_tensors=lost_tensors)

    def forget_peer(self, peer: str) -> None:
        """Free everything held for a peer that is gone or has come back as another incarnation."""
        for session in self._sessions.of_peer(peer):
            self._drop(session.key)
        self._outbox = [(to, message) for to, message in self._outbox if to != peer]

    def has_work(self) -> bool:
        return bool(self._asked or self._outbox)

    def load(self) -> DrafterLoad:
        return DrafterLoad(
            num_sessions=len(self._sessions),
            queue_depth=len(self._asked),
            mean_draft_s=self._mean_draft_s,
            counters=replace(self.counters),
        )

    def step(self) -> list[tuple[str, DrafterMessage]]:
        """Run one batched step; return (peer, message) for drafts that became complete and for resyncs."""
        self._expire()
        if self._asked:
            asks = [self._ask_of(session) for session in in_turns(self._asked.values())]
            with self._spare_time.timed():
                results = self._drafter.draft(asks, max_num_tokens=self._config.max_num_batched_tokens)
            for result in results:
                self._answer(result)
        return self.flush()

    def flush(self) -> list[tuple[str, DrafterMessage]]:
        """Return the messages that need no step: resyncs, and drafts that were there before they were asked for."""
        outbox, self._outbox = self._outbox, []
        return outbox

    def has_spare_work(self) -> bool:
        """Tell whether `run_ahead` has anything to do: only while nothing is asked for."""
        return not self._asked and self._spare_time.has_work()

    def run_ahead(self, max_num_tokens: int = MAX_AHEAD_TOKENS) -> None:
        """Spend one forward on what may be asked for next, unless something is asked for now."""
        if self.has_spare_work():
            self._spare_time.spend(min(max_num_tokens, self._config.max_num_batched_tokens))

    def check_integrity(self) -> None:
        """Raise `AssertionError` if sessions, asks and the drafter's own state contradict each other."""
        self._sessions.check_integrity()
        waiting = {session.key for session in self._sessions if session.round is not None}
        assert waiting == self._asked.keys(), "asks and unanswered rounds differ"
        self._drafter.check_integrity({session.key for session in self._sessions})

    # --- messages ---

    def _open(self, key: SessionKey, message: Open) -> None:
        self._asked.pop(key, None)
        session = Session(key, message.sampling, list(message.token_ids), self._clock(), cache_salt=message.cache_salt)
        self._sessions.put(session)
        self._check_tokens(key, message.token_ids, may_be_empty=False)
        self._evict(self._sessions.surplus())

    def _take_states(self, key: SessionKey, message: States) -> None:
        """Keep states; a session that cannot use them is given up, for the verifier to say everything again."""
        session = self._sessions.get(key)
        if session is None or session.refusal is not None or not self._drafter.needs.taps:
            return  # of an unknown one the commit that follows says so; the others have no use for them
        num_bytes = session.states.num_bytes
        try:
            session.states.append(message, self._drafter.needs)
        except UnusableStatesError as error:
            self._refuse(session, str(error))
        except ValueError:
            self.counters.num_bad_messages += 1
            self._ask_for_resync(key)
        if session.states.num_bytes > num_bytes:
            self._bound_states(session)

    def _bound_states(self, grown: Session) -> None:
        """Let other sessions make room for one whose states have grown; refuse it if even so it has none."""
        limit = self._config.max_state_bytes
        if grown.states.num_bytes > limit:
            self._refuse(grown, f"states of {grown.states.num_bytes} bytes, max_state_bytes is {limit}")
        self._evict(self._sessions.surplus_states(limit, spared=grown))

    def _commit(self, key: SessionKey, message: Commit) -> None:
        session = self._sessions.get(key)
        if session is None or message.position != len(session.token_ids):
            self._ask_for_resync(key)
            return
        now_s = self._clock()
        self._sessions.touch(session, now_s)
        self._supersede(session)
        session.token_ids.extend(message.token_ids)
        self._check_tokens(key, message.token_ids, may_be_empty=True)
        session.take_pause(now_s)
        if message.max_length <= 0:
            self._spare_time.forget(key)
            return
        length = self._draft_length(session, message.max_length)
        if length == 0:
            self._spare_time.forget(key)
            self._reply_empty(key, message.round_id, len(session.token_ids))
            return
        self._num_asks += 1
        session.round = UnansweredRound(
            self._num_asks,
            message.round_id,
            length,
            now_s,
            max_nodes=max(0, min(message.max_nodes, self._config.max_tree_nodes)),
            predicted_ids=self._known_predictions(message),
            forced_ids=known_prefix(message.forced_ids[:length], self.vocab_size),
        )
        self._asked[key] = session
        if self._spare_time.expects(key):
            result = self._spare_time.answer(self._ask_of(session), session.pause_s)
            if result is not None:
                self._answer(result)

    def _known_predictions(self, message: Commit) -> tuple[int, ...]:
        """Return the predictions, all or none: each belongs to a place, and what is drafted must be tokens."""
        is_known = first_bad_token(message.predicted_ids, self.vocab_size) is None
        return message.predicted_ids if is_known else ()

    def _check_tokens(self, key: SessionKey, token_ids: Sequence[int], *, may_be_empty: bool) -> None:
        """Refuse a session whose tokens the drafter cannot know: a resync would only bring the same tokens again."""
        session = self._sessions.get(key)
        bad = first_bad_token(token_ids, self.vocab_size)
        if session is None or (bad is None and (token_ids or may_be_empty)):
            return
        self._refuse(session, "empty prefix" if bad is None else f"token id {bad} outside [0, {self.vocab_size})")

    def _refuse(self, session: Session, reason: str) -> None:
        """Draft nothing for a session any more, since saying it again would not mend it."""
        self._answer_empty(session)
        session.refusal, session.states = reason, StateBuffer()
        self.counters.num_bad_messages += 1
        self._drafter.release(session.key)

    def _draft_length(self, session: Session, max_length: int) -> int:
        """Return how many tokens to draft; only counts decide, never what would be drawn."""
        if session.refusal is not None:
            return 0
        # the last drafted token is never computed, so it may lie one beyond the draft model's context
        room = self._drafter.max_model_len - len(session.token_ids) + 1
        return max(0, min(max_length, self._config.max_draft_length, room))

    def _supersede(self, session: Session) -> None:
        if session.round is not None:
            self.counters.num_superseded_rounds += 1
            session.round = None
            del self._asked[session.key]

    def _ask_for_resync(self, key: SessionKey, *, lost_tensors: bool = False) -> None:
        """Give a session up and say so: what is known of it is not what the verifier believes."""
        self._drop(key)
        self.counters.num_resyncs += 1
        self._outbox.append((key.peer, Resync(request_id=key.request_id, lost_tensors=lost_tensors)))

    # --- sessions and answers ---

    def _drop(self, key: SessionKey) -> None:
        self._asked.pop(key, None)
        if self._sessions.remove(key) is not None:
            self._drafter.release(key)

    def _evict(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self.counters.num_evicted_sessions += 1
            self._answer_empty(session)
            self._drop(session.key)

    def _answer_empty(self, session: Session) -> None:
        """Give a session that waits for a draft the honest answer, that there is none."""
        if session.round is not None:
            self._reply_empty(session.key, session.round.round_id, len(session.token_ids))
            session.round = None
            del self._asked[session.key]

    def _expire(self) -> None:
        for session in self._sessions.expired(self._clock()):
            self.counters.num_expired_sessions += 1
            self._drop(session.key)

    def _answer(self, result: DraftResult) -> None:
        session = self._asked.pop(result.key)
        ask = session.round
        assert ask is not None
        assert ask.ask_id == result.ask_id, "a drafter answered what it was not asked for"
        session.round = None
        session.answered_s = self._clock()
        waited_s = session.answered_s - ask.asked_s
        self._observe(waited_s)
        self._spare_time.observe_answer(waited_s)
        self.counters.num_drafts += 1
        self.counters.num_draft_tokens += len(result.token_ids)
        draft = Draft(
            request_id=result.key.request_id,
            round_id=ask.round_id,
            position=len(session.token_ids),
            token_ids=result.token_ids,
            draft_probs=result.draft_probs,
            parents=result.parents,
            confidences=result.confidences,
        )
        self._outbox.append((result.key.peer, draft))

    def _ask_of(self, session: Session) -> Ask:
        assert session.round is not None
        return Ask(
            key=session.key,
            ask_id=session.round.ask_id,
            token_ids=session.token_ids,
            sampling=_GREEDY if self._config.drafts_greedily else session.sampling,
            length=session.round.length,
            max_nodes=session.round.max_nodes,
            cache_salt=session.cache_salt,
            states=session.states.tensor,
            predicted_ids=session.round.predicted_ids,
            forced_ids=session.round.forced_ids,
        )

    def _reply_empty(self, key: SessionKey, round_id: int, position: int) -> None:
        draft = Draft(request_id=key.request_id, round_id=round_id, position=position, token_ids=())
        self._outbox.append((key.peer, draft))

    def _observe(self, draft_s: float) -> None:
        mean_s = self._mean_draft_s
        self._mean_draft_s = draft_s if mean_s is None else mean_s + SMOOTHING * (draft_s - mean_s)


Handle = Callable[[str, VerifierMessage], None]


def handle_payload(engine: DraftEngine, peer: str, payload: bytes, handle: Handle | None = None) -> list[bytes]:
    """Decode one message and hand it to the engine, or to what stands before it; return answers that need no step.

    A message that does not decode fails its own session only: where its request can be read, the verifier is asked
    to say everything again. Ids longer than any of ours are dropped: answers repeat them.
    """
    handle = handle or engine.handle
    message: VerifierMessage | None = None
    try:
        message = decode(payload, VERIFIER_MESSAGES)
        request_id: str | None = message.request_id
    except WireError:
        request_id = peek_request_id(payload)
    if request_id is None or len(request_id) > MAX_REQUEST_ID_CHARS:
        engine.counters.num_bad_messages += 1
        return []
    if message is None:
        engine.counters.num_bad_messages += 1
        handle(peer, Close(request_id=request_id))
        engine.counters.num_resyncs += 1
        return [encode(Resync(request_id=request_id))]
    handle(peer, message)
    return []
