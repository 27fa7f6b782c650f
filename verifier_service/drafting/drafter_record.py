"""What a verifier remembers of its drafters, of what each was told about a request, and of the rounds between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.verifier_service.drafting.draft_yield import DraftYield
from outrider.verifier_service.drafting.joining import DueDraft
from outrider.verifier_service.drafting.round_timer import LateShare, RoundTimer
from outrider.verifier_service.links.circuit_breaker import CircuitBreaker
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.messages.engine import DrafterPerformance
from outrider.verifier_service.messages.request import Request


@dataclass(slots=True)
class OutstandingRound:
    """One outstanding ask."""

    round_id: int
    position: int
    max_length: int
    max_nodes: int
    asked_s: float
    background_until_s: float | None = None  # given: until then it may be answered, and nothing waits for that


@dataclass(slots=True, kw_only=True)
class AnsweredRound:
    """Who drafted what is attached to a request, and when, by the engine's clock."""

    drafter_id: str
    asked_s: float
    received_s: float


@dataclass(slots=True)
class DraftSession:
    """What one drafter has been told about one request."""

    drafter_id: str
    num_sent_tokens: int = 0  # 0: not open
    num_sent_states: int = 0
    has_answered: bool = False  # since it was opened; until then its rounds contain a prefill
    round: OutstandingRound | None = None
    missed: OutstandingRound | None = None  # the last one whose deadline passed
    missed_deadline_s: float = 0.0

    @property
    def background_until_s(self) -> float | None:
        """Until when a round that nothing waits for may be answered; None: there is none such."""
        return None if self.round is None else self.round.background_until_s


class WantedDraft(NamedTuple):
    """What a request will ask for."""

    request: Request
    session: DraftSession
    length: int


@dataclass(slots=True)
class DrafterRecord:
    """What the verifier knows of one drafter that is up."""

    vocab_size: int
    needs: DraftNeeds
    timer: RoundTimer
    opening_timer: RoundTimer  # of rounds that contain the drafter's prefill
    breaker: CircuitBreaker = field(default_factory=CircuitBreaker)
    late_share: LateShare = field(default_factory=LateShare)  # of the other rounds
    draft_yield: DraftYield = field(default_factory=DraftYield)
    session_ids: set[str] = field(default_factory=set)

    @classmethod
    def new(cls, vocab_size: int, needs: DraftNeeds, *, first_s: float, min_s: float, max_s: float) -> DrafterRecord:
        """Return that of a drafter that has not answered yet; `first_s`, `min_s` and `max_s` bound its deadlines."""
        return cls(
            vocab_size,
            needs,
            timer=RoundTimer(first_s=first_s, min_s=min_s, max_s=max_s),
            opening_timer=RoundTimer(first_s=first_s, min_s=max_s / 4, max_s=max_s),
        )

    def timer_of(self, session: DraftSession) -> RoundTimer:
        return self.timer if session.has_answered else self.opening_timer

    def due(self, session: DraftSession) -> DueDraft | None:
        """Return when the draft of a session's round is expected; None where earlier rounds do not tell."""
        if session.round is None or not session.has_answered or self.timer.smoothed_s is None:
            return None
        asked_s, num_tokens = session.round.asked_s, 1 + session.round.max_length
        return DueDraft(asked_s + self.timer.smoothed_s, asked_s + self.timer.latest_s, num_tokens)

    def performance(self, drafter_id: str, now_s: float, step: int) -> DrafterPerformance | None:
        """Return how it serves, by the step of `DraftYield`; None: it has not answered yet."""
        if self.timer.smoothed_s is None:
            return None
        return DrafterPerformance(
            drafter_id=drafter_id,
            round_trip_s=self.timer.smoothed_s,
            late_share=self.late_share.at(now_s),
            accepted_per_round=self.draft_yield.at(step),
        )
