"""A drafter's load and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.verifier_service.messages.counts import GraphCounts
from outrider.verifier_service.messages.metric import shown


@dataclass(slots=True)
class DrafterCounters:
    """A drafter's counters since start."""

    num_drafts: int = shown("drafter_drafts", "Asks that a drafter answered")
    num_draft_tokens: int = shown("drafter_draft_tokens", "Tokens that a drafter drafted")
    num_resyncs: int = 0
    num_superseded_rounds: int = 0
    num_evicted_sessions: int = shown("drafter_evicted_sessions", "Sessions that a drafter dropped for want of room")
    num_expired_sessions: int = 0
    num_bad_messages: int = 0
    num_cache_hits: int = shown(
        "speculation_cache_hits",
        "Asks that a drafter answered at once, having drafted ahead for that outcome; rate = this / (this + misses)",
    )
    num_cache_misses: int = shown(
        "speculation_cache_misses",
        "Asks of an outcome that a drafter had not drafted ahead for, though it had for others",
    )
    num_ahead_tokens: int = 0  # tokens drafted by running ahead, used or not
    graphs: GraphCounts = field(default_factory=GraphCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLoad:
    """A drafter's load."""

    num_sessions: int = shown("draft_sessions", "Sessions that a drafter holds", is_gauge=True)
    queue_depth: int = shown("draft_queue_depth", "Asks that a drafter has not answered", is_gauge=True)
    mean_draft_s: float | None = None  # smoothed time from ask to draft inside the engine; None: no draft yet
    counters: DrafterCounters = field(default_factory=DrafterCounters)
    # of the last update of its own weights, "" before the first; None: it has none, or they are the target's
    weight_version: str | None = None
