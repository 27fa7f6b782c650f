"""A verifier's records of its drafters, of their sessions, and of the rounds in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.verifier_service.drafting.draft_yield import DraftYield
from outrider.verifier_service.drafting.joining import DueDraft
from outrider.verifier_service.drafting.round_timer import LateShare, RoundTimer
from outrider.verifier_service.links.circuit_breaker import CircuitBreaker
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.messages.engine import BreakerState, DrafterPerformance
from outrider.verifier_service.messages.request import Request, SpeculationPlan


@dataclass(slots=True)
class OutstandingRound:
    """One ask without an answer yet."""

    round_id: int
    position: int
    max_length: int
    max_nodes: int
    asked_s: float
    background_until_s: float | None = None  # deadline of a round that no step waits for; None: the request is held
    max_computed: int | None = None


@dataclass(slots=True, kw_only=True)
class AnsweredRound:
    """A request's last answered round: drafter and times, by the engine's clock."""

    drafter_id: str
    asked_s: float
    received_s: float


@dataclass(slots=True)
class DraftSession:
    """What one drafter has been sent about one request."""

    drafter_id: str
    num_sent_tokens: int = 0  # 0: not open
    num_sent_states: int = 0
    has_answered: bool = False  # since it was opened; until then a round includes the drafter's prefill
    round: OutstandingRound | None = None
    missed: OutstandingRound | None = None  # the last round whose deadline passed
    missed_deadline_s: float = 0.0


class WantedDraft(NamedTuple):
    """An ask to be sent."""

    request: Request
    session: DraftSession
    length: int
    max_computed: int | None = None  # as in `Commit`


@dataclass(slots=True)
class DrafterRecord:
    """One drafter that is up."""

    vocab_size: int
    needs: DraftNeeds
    is_plain: bool  # it needs nothing but tokens
    timer: RoundTimer
    opening_timer: RoundTimer  # for rounds that include the drafter's prefill
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    late_share: LateShare = field(default_factory=LateShare)  # over the other rounds
    draft_yield: DraftYield = field(default_factory=DraftYield)
    session_ids: set[str] = field(default_factory=set)

    @classmethod
    def new(cls, vocab_size: int, needs: DraftNeeds, *, first_s: float, min_s: float, max_s: float) -> DrafterRecord:
        """Return the record of a new drafter; `first_s`, `min_s` and `max_s` bound its deadlines (see `RoundTimer`)."""
        return cls(
            vocab_size,
            needs,
            is_plain=not (needs.taps or needs.predictions or needs.num_top or needs.finds_some),
            timer=RoundTimer(first_s=first_s, min_s=min_s, max_s=max_s),
            opening_timer=RoundTimer(first_s=first_s, min_s=max_s / 4, max_s=max_s),
        )

    def timer_of(self, session: DraftSession) -> RoundTimer:
        return self.timer if session.has_answered else self.opening_timer

    def due(self, session: DraftSession) -> DueDraft | None:
        """Return when the draft of a session's round is expected; None: no round, or no estimate yet."""
        if session.round is None or not session.has_answered or self.timer.smoothed_s is None:
            return None
        asked_s, num_tokens = session.round.asked_s, 1 + session.round.max_length
        return DueDraft(asked_s + self.timer.smoothed_s, asked_s + self.timer.latest_s, num_tokens)

    def performance(
        self, drafter_id: str, now_s: float, step: int, num_updates_behind: int | None = None
    ) -> DrafterPerformance | None:
        """Return round trip, late share and yield (as of `step`, see `DraftYield`); None: it has not answered yet."""
        if self.timer.smoothed_s is None:
            return None
        return DrafterPerformance(
            drafter_id=drafter_id,
            round_trip_s=self.timer.smoothed_s,
            late_share=self.late_share.share_at(now_s),
            accepted_per_round=self.draft_yield.mean_at(step),
            num_updates_behind=num_updates_behind,
        )


class DrafterChoice:
    """Who is asked after one step; its requests choose one after the other, before any is asked."""

    def __init__(self, drafters: Mapping[str, DrafterRecord], now_s: float) -> None:
        self._drafters, self._now_s = drafters, now_s
        self._num_placed: Counter[str] = Counter()  # sessions that are to begin, and probes, by drafter
        closed = (id_ for id_, record in drafters.items() if record.breaker.state is BreakerState.CLOSED)
        self.sure = frozenset(closed)  # drafters that may be asked by any number of requests

    def of(self, plan: SpeculationPlan, session: DraftSession | None, *, is_asking: bool) -> str | None:
        """Return the plan's drafter if its breaker allows it, else the session's, else that with fewest sessions.

        Only a request that may ask takes a place.
        """
        own_id = None if session is None else session.drafter_id
        found = next(filter(self._may_ask, filter(None, (plan.drafter_id, own_id))), None)
        if found is None:
            able = filter(self._may_ask, self._drafters)
            found = min(able, key=lambda drafter_id: (self._num_sessions(drafter_id), drafter_id), default=None)
        if found is not None and is_asking:
            is_probe = self._drafters[found].breaker.state is not BreakerState.CLOSED
            self._num_placed[found] += is_probe or found != own_id
        return found

    def _num_sessions(self, drafter_id: str) -> int:
        return len(self._drafters[drafter_id].session_ids) + self._num_placed[drafter_id]

    def _may_ask(self, drafter_id: str) -> bool:
        """Return whether a drafter is up and its breaker allows another ask: of probes, one at a time."""
        breaker = self._drafters[drafter_id].breaker if drafter_id in self._drafters else None
        if breaker is None or breaker.state is BreakerState.CLOSED:
            return breaker is not None
        return breaker.would_allow(self._now_s) and not self._num_placed[drafter_id]
