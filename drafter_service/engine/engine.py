"""The drafting engine: sessions of many verifiers, one batched step over all of their asks.

It knows nothing of processes, sockets or event loops: messages come in through `handle`, drafts go out of `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from outrider.drafter_service.engine.drafter import (
    GREEDY,
    Ask,
    ChainsLaunched,
    DraftEngineConfig,
    Drafter,
    DraftsChains,
    SessionKey,
    TakesTexts,
    first_bad_token,
    known_or_none,
    known_prefix,
    remember,
    seed,
)
from outrider.drafter_service.engine.forward_cost import ForwardCost
from outrider.drafter_service.engine.learning_messages import ServedSample
from outrider.drafter_service.engine.messages import Addressed, framed, split
from outrider.drafter_service.engine.sessions import (
    Round,
    RunningMean,
    Session,
    SessionObserver,
    SessionTable,
    in_turns,
)
from outrider.drafter_service.engine.spare_time import MAX_AHEAD_TOKENS, RunsAhead, SpareTime
from outrider.drafter_service.engine.state_buffer import StateBuffer, UnusableStatesError
from outrider.verifier_service.messages.columns import Chains
from outrider.verifier_service.messages.draft import (
    Close,
    Commit,
    Commits,
    Draft,
    Drafts,
    Open,
    Resync,
    Seed,
    States,
    VerifierMessage,
)
from outrider.verifier_service.messages.drafter_load import DrafterCounters, DrafterLoad


class DraftEngine:
    """Continuous batching over every session of every verifier.

    Seed           responses of rollouts that ended elsewhere, for a drafter that remembers them
    Open, States   a session: the request's committed tokens, and the target's states where the drafter reads them
    Commit         tokens that were committed since, and a round: a draft is asked for after them
    Commits        the same of many sessions, in columns, as their answers are
    step           one call of the drafter with the asks of all unanswered rounds; complete drafts are answers
    run_ahead      while nothing is asked for: drafts for what may be committed next
    Resync         the answer to what contradicts a session: the verifier says all of it again
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        clock: Callable[[], float],
        config: DraftEngineConfig,
        ahead: RunsAhead | None = None,
        cost: ForwardCost | None = None,
        has_weights: bool = False,
    ) -> None:
        """`ahead` is the drafter itself, where it can run ahead: `run_ahead` then uses spare time.

        `cost` estimates the drafter's forwards; None: by recent times alone. `has_weights`: of its own, which an update
        of the target's leaves as they are.
        """
        self.vocab_size, self.max_model_len, self.needs = drafter.vocab_size, drafter.max_model_len, drafter.needs
        self.weight_version: str | None = "" if has_weights else None  # of the last update; None: no weights
        self.counters = DrafterCounters()
        self.observer: SessionObserver | None = None  # while the pool learns
        self._drafter = drafter
        self._chains = drafter if isinstance(drafter, DraftsChains) else None
        cost = ForwardCost(clock) if cost is None else cost
        self._runs_ahead = ahead is not None
        self._spare_time = SpareTime(ahead, cost=cost, counters=self.counters)
        self._clock = clock
        self.config = config
        self._sessions = SessionTable(max_sessions=config.max_sessions, ttl_s=config.session_ttl_s)
        self._asked: dict[int, Session] = {}  # by the ask of their unanswered round, oldest round first
        self._outbox: list[Addressed] = []
        self._columns: dict[str, list[Draft]] = {}  # by peer: answers to what it asked for in columns
        self.launched: tuple[list[Session], ChainsLaunched] | None = None  # what `step` reads
        self._num_asks = 0
        self._draft_s = RunningMean()  # from a round to its answer

    def handle(self, peer: str, message: VerifierMessage) -> None:
        """Follow one message of a peer (one connection of one verifier incarnation)."""
        assert self.launched is None, "the drafter is drafting"
        if isinstance(message, Commits):
            self._commit_all(peer, message)
            return
        key = SessionKey(peer, message.request_id)
        match message:
            case Open():
                self._open(key, message)
            case Seed():
                self.counters.num_bad_messages += not seed(self._drafter, message)
            case States():
                self._take_states(key, message)
            case Commit():
                self._commit(key, message)
            case Close():
                self._close(key)

    def take_texts(self, samples: Sequence[ServedSample]) -> None:
        """Let a drafter that looks tokens up remember texts, see `TakesTexts`; others ignore them."""
        if isinstance(self._drafter, TakesTexts):
            self._drafter.take_texts(samples)

    def forget_peer(self, peer: str) -> None:
        """Free everything held for a peer that is gone or has come back as another incarnation."""
        for session in self._sessions.of_peer(peer):
            self._drop(session.key)
        self._outbox = [(to, message) for to, message in self._outbox if to != peer]
        self._columns.pop(peer, None)

    @property
    def has_messages(self) -> bool:
        """Whether `flush` has any."""
        return bool(self._outbox or self._columns)

    def has_work(self) -> bool:
        return bool(self._asked) or self.has_messages

    def load(self) -> DrafterLoad:
        return DrafterLoad(
            num_sessions=len(self._sessions),
            queue_depth=len(self._asked),
            mean_draft_s=self._draft_s.value,
            counters=replace(self.counters),
            weight_version=self.weight_version,
        )

    def take_version(self, version: str) -> None:
        """Go on with new weights: what the old ones computed of the sessions is dropped, and computed again when asked.

        No step may be running. Sessions and unanswered rounds stay, with the target's states: those are the target's.
        """
        self.weight_version = version
        if self.observer is not None:
            self.observer.take_version(version)
        for session in self._sessions:
            self._drafter.release(session.key)

    def step(self) -> list[Addressed]:
        """Run one batched step; return (peer, message) for drafts that became complete and for resyncs."""
        self._expire()
        if self._asked and not self.launch():
            with self._spare_time.timed():
                drafts = self._drafter.draft(self._asks(), max_num_tokens=self.config.max_num_batched_tokens)
            for draft in drafts:
                self._answer(draft)
        if self.launched is not None:
            (sessions, launched), self.launched = self.launched, None
            for rows, chains in launched.read():
                self._answer_chains([sessions[row] for row in rows], chains)
        return self.flush()

    def launch(self) -> bool:
        """Begin the next step, where its drafts need no more of the host; return whether it has begun.

        Until `step` has ended it, nothing may be handled.
        """
        if self.launched is None and self._asked and self._chains is not None:
            asks = self._asks()
            chains = self._chains.draft_chains(asks, max_num_tokens=self.config.max_num_batched_tokens)
            if chains is not None:
                self.launched = [self._asked[ask.ask_id] for ask in asks], chains
        return self.launched is not None

    def flush(self) -> list[Addressed]:
        """Return the messages that need no step: resyncs, and answers that were prepared."""
        outbox, columns = self._outbox, self._columns
        self._outbox, self._columns = [], {}
        return outbox + [(peer, frame) for peer, drafts in columns.items() for frame in framed(drafts)]

    def has_spare_work(self) -> bool:
        """Return whether `run_ahead` has anything to do: only while nothing is asked for."""
        return not self._asked and self._spare_time.has_work()

    def run_ahead(self, max_num_tokens: int = MAX_AHEAD_TOKENS) -> None:
        """Run one forward for what may be asked next, unless something is asked for now."""
        if self.has_spare_work():
            self._spare_time.spend(min(max_num_tokens, self.config.max_num_batched_tokens))

    def check_integrity(self) -> None:
        """Raise `AssertionError` if sessions, asks and the drafter's own state contradict each other."""
        self._sessions.check_integrity()
        waiting = {session.round.ask.ask_id for session in self._sessions if session.round is not None}
        assert waiting == self._asked.keys(), "asks and unanswered rounds differ"
        keys = {session.key for session in self._sessions}
        if self.launched is None:
            self._drafter.check_integrity(keys)
        if self.observer is not None:
            self.observer.check_integrity(keys)

    def _asks(self) -> list[Ask]:
        sessions = in_turns(self._asked.values())
        return [session.round.ask for session in sessions if session.round is not None]

    # --- messages ---

    def _open(self, key: SessionKey, message: Open) -> None:
        if (older := self._sessions.get(key)) is not None:
            self._take_round(older)
        token_ids, now_s = list(message.token_ids), self._clock()
        session = Session(key, message.sampling, token_ids, now_s, message.cache_salt, message.history)
        self._sessions.put(session)
        if self.observer is not None:
            self.observer.open(session, message)
        self._check_tokens(key, message.token_ids, may_be_empty=False)
        self._evict(self._sessions.surplus())

    def _take_states(self, key: SessionKey, message: States) -> None:
        """Keep states; a session that they do not fit is resynced."""
        session = self._sessions.get(key)
        if session is None or session.refusal is not None or not self._drafter.needs.taps:
            return  # an unknown session is resynced by the commit that follows; the others have no use for states
        num_bytes = session.states.num_bytes
        try:
            session.states.append(message, self._drafter.needs)
        except UnusableStatesError as error:
            self._refuse(session, str(error))
        except ValueError:
            self.counters.num_bad_messages += 1
            self.resync(key)
        else:
            if self.observer is not None and self._drafter.needs.last_state_only:
                self.observer.take_state(session, message)
        if session.states.num_bytes > num_bytes:
            self._bound_states(session)

    def _bound_states(self, grown: Session) -> None:
        """Let other sessions make room for one whose states have grown; refuse it if even so it has none."""
        limit = self.config.max_state_bytes
        if grown.states.num_bytes > limit:
            self._refuse(grown, f"states of {grown.states.num_bytes} bytes, max_state_bytes is {limit}")
        self._evict(self._sessions.surplus_states(limit, spared=grown))

    def _commit(self, key: SessionKey, message: Commit, *, in_columns: bool = False) -> None:
        session, now_s = self._sessions.get(key), self._clock()
        if session is None or message.position != len(session.token_ids):
            self.resync(key)
            return
        self._append(session, message.token_ids, now_s)
        if self.observer is not None:
            self.observer.commit(session, message)
        self._check_tokens(key, message.token_ids, may_be_empty=True)
        self._begin_round(session, message.round_id, message.max_length, now_s, in_columns=in_columns, told=message)

    def _commit_all(self, peer: str, frame: Commits) -> None:
        """Follow the rows of a frame: all together where there is nothing to find in single ones."""
        ids, now_s = frame.token_ids, self._clock()
        if self.observer is not None or (len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size):
            for commit in frame.commits():
                self._commit(SessionKey(peer, commit.request_id), commit, in_columns=True)
            return
        token_ids, end = ids.tolist(), 0
        numbers = (frame.round_ids, frame.positions, frame.counts, frame.max_lengths)
        rows = zip(frame.request_ids, *(column.tolist() for column in numbers), strict=True)
        for request_id, round_id, position, count, max_length in rows:
            begin, end = end, end + count
            session = self._sessions.get(key := SessionKey(peer, request_id))
            if session is None or position != len(session.token_ids):
                self.resync(key)
                continue
            self._append(session, token_ids[begin:end], now_s)
            self._begin_round(session, round_id, max_length, now_s, in_columns=True, told=None)

    def _append(self, session: Session, token_ids: Sequence[int], now_s: float) -> None:
        """Take tokens that were committed; a round that is not answered is over."""
        self._sessions.touch(session, now_s)
        if session.round is not None:
            self._take_round(session)
            self.counters.num_superseded_rounds += 1
        session.token_ids.extend(token_ids)

    def _begin_round(
        self, session: Session, round_id: int, max_length: int, now_s: float, *, in_columns: bool, told: Commit | None
    ) -> None:
        """Ask the drafter, unless there is nothing to draft; `told`: what else was said for the draft."""
        if self._runs_ahead:
            session.take_pause(now_s)
        length = self._draft_length(session, max_length)
        if length == 0:
            self._spare_time.forget(session.key)
            if max_length > 0:
                self._reply_empty(session.key, round_id, len(session.token_ids), in_columns)
            return
        self._num_asks += 1
        ask = Ask(
            key=session.key,
            ask_id=self._num_asks,
            token_ids=session.token_ids,
            sampling=GREEDY if self.config.drafts_greedily else session.sampling,
            length=length,
            cache_salt=session.cache_salt,
            history=session.history,
            states=session.states.tensor,
        )
        if told is not None:
            ask.max_nodes = max(0, min(told.max_nodes, self.config.max_tree_nodes))
            ask.max_computed = told.max_computed
            ask.predicted_ids = known_or_none(told.predicted_ids, self.vocab_size)
            ask.forced_ids = known_prefix(told.forced_ids[:length], self.vocab_size)
        session.round = Round(ask, round_id, now_s, in_columns)
        self._asked[ask.ask_id] = session
        if self._runs_ahead and self._spare_time.expects(session.key):
            draft = self._spare_time.answer(ask, session.pause_s.value)
            if draft is not None:
                self._answer(draft, was_ahead=True)

    def _check_tokens(self, key: SessionKey, token_ids: Sequence[int], *, may_be_empty: bool) -> None:
        """Refuse a session with ids outside the vocabulary: a resync would bring the same ids again."""
        session = self._sessions.get(key)
        bad = first_bad_token(token_ids, self.vocab_size)
        if session is None or (bad is None and (token_ids or may_be_empty)):
            return
        self._refuse(session, "empty prefix" if bad is None else f"token id {bad} outside [0, {self.vocab_size})")

    def _refuse(self, session: Session, reason: str) -> None:
        """Draft nothing for a session any more: a resync would not mend it."""
        self._answer_empty(session)
        session.refusal, session.states = reason, StateBuffer()
        self.counters.num_bad_messages += 1
        self._drafter.release(session.key)

    def _draft_length(self, session: Session, max_length: int) -> int:
        """Return how many tokens to draft. Counts alone decide, never what would be drawn (the trap)."""
        if session.refusal is not None:
            return 0
        # the last drafted token is never computed, so it may lie one beyond the draft model's context
        room = self._drafter.max_model_len - len(session.token_ids) + 1
        return max(0, min(max_length, self.config.max_draft_length, room))

    def _take_round(self, session: Session) -> Round | None:
        """Take a session's round from it, where it has one: nobody answers it any more."""
        unanswered, session.round = session.round, None
        if unanswered is not None:
            del self._asked[unanswered.ask.ask_id]
        return unanswered

    def resync(self, key: SessionKey, *, lost_tensors: bool = False) -> None:
        """Drop a session and ask its verifier for all of it again."""
        self._drop(key)
        self.counters.num_resyncs += 1
        self._outbox.append((key.peer, Resync(request_id=key.request_id, lost_tensors=lost_tensors)))

    # --- sessions and answers ---

    def _close(self, key: SessionKey) -> None:
        """End a session; what it leaves behind is kept, as it is not of one that is lost, evicted or refused."""
        session = self._sessions.get(key)
        if session is not None and session.refusal is None:
            remember(self._drafter, session.history, session.token_ids)
            if self.observer is not None:
                self.observer.close(session)
        self._drop(key)

    def _drop(self, key: SessionKey) -> None:
        if (session := self._sessions.remove(key)) is not None:
            self._take_round(session)
            if self.observer is not None:
                self.observer.drop(session)
            self._drafter.release(key)

    def _evict(self, sessions: Sequence[Session]) -> None:
        for session in sessions:
            self.counters.num_evicted_sessions += 1
            self._answer_empty(session)
            self._drop(session.key)

    def _answer_empty(self, session: Session) -> None:
        """Answer a session's round, where it has one, by an empty draft."""
        if (unanswered := self._take_round(session)) is not None:
            self._reply_empty(session.key, unanswered.round_id, len(session.token_ids), unanswered.in_columns)

    def _expire(self) -> None:
        for session in self._sessions.expired(self._clock()):
            self.counters.num_expired_sessions += 1
            self._drop(session.key)

    def _answer(self, draft: Draft, *, was_ahead: bool = False) -> None:
        """Send a drafter's answer, whose round is the engine's number, as one to the verifier's round."""
        session = self._asked[draft.round_id]
        unanswered = self._take_round(session)
        assert unanswered is not None
        draft.round_id, draft.position = unanswered.round_id, len(session.token_ids)
        session.answered_s = self._clock()
        waited_s = session.answered_s - unanswered.asked_s
        self._draft_s.observe(waited_s)
        self._spare_time.observe_answer(waited_s)
        self.counters.num_drafts += 1
        self.counters.num_draft_tokens += len(draft.token_ids)
        if self.observer is not None:
            self.observer.answer(session, unanswered.ask, draft, was_ahead=was_ahead)
        self._reply(session.key.peer, draft, unanswered.in_columns)

    def _answer_chains(self, sessions: Sequence[Session], chains: Chains) -> None:
        """Send a drafter's chains as `_answer` does; one that runs ahead drafts none as arrays."""
        now_s = self._clock()
        rounds: list[Round] = []
        of_peer: dict[tuple[str, bool], list[int]] = {}
        for row, session in enumerate(sessions):
            unanswered = self._take_round(session)
            assert unanswered is not None, "an answer to nothing"
            rounds.append(unanswered)
            of_peer.setdefault((session.key.peer, unanswered.in_columns), []).append(row)
        for asked_s in {each.asked_s for each in rounds}:
            self._draft_s.observe(now_s - asked_s)
        self.counters.num_drafts += len(sessions)
        self.counters.num_draft_tokens += len(chains.token_ids)
        for (peer, in_columns), rows in of_peer.items():
            frame = Drafts(
                request_ids=tuple(sessions[row].key.request_id for row in rows),
                round_ids=np.array([rounds[row].round_id for row in rows], np.int64),
                positions=np.array([len(sessions[row].token_ids) for row in rows], np.int64),
                **chains.columns_of(None if len(rows) == len(sessions) else rows),
            )
            if self.observer is not None:
                for row, draft in zip(rows, frame.drafts(), strict=True):
                    self.observer.answer(sessions[row], rounds[row].ask, draft, was_ahead=False)
            self._outbox += ((peer, message) for message in (split(frame) if in_columns else frame.drafts()))

    def _reply_empty(self, key: SessionKey, round_id: int, position: int, in_columns: bool) -> None:
        draft = Draft(request_id=key.request_id, round_id=round_id, position=position, token_ids=())
        self._reply(key.peer, draft, in_columns)

    def _reply(self, peer: str, draft: Draft, in_columns: bool) -> None:
        if in_columns:
            self._columns.setdefault(peer, []).append(draft)
        else:
            self._outbox.append((peer, draft))
