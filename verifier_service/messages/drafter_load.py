"""A drafter's load and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from outrider.verifier_service.messages.counts import GraphCounts, Metric


@dataclass(slots=True)
class DrafterCounters:
    """A drafter's counters since start."""

    num_drafts: Annotated[int, Metric("drafter_drafts", "Asks that a drafter answered")] = 0
    num_draft_tokens: Annotated[int, Metric("drafter_draft_tokens", "Tokens that a drafter drafted")] = 0
    num_resyncs: int = 0
    num_superseded_rounds: int = 0
    num_evicted_sessions: Annotated[
        int, Metric("drafter_evicted_sessions", "Sessions that a drafter dropped for want of room")
    ] = 0
    num_expired_sessions: int = 0
    num_bad_messages: int = 0
    num_cache_hits: Annotated[
        int,
        Metric(
            "speculation_cache_hits",
            "Asks that a drafter answered at once, having drafted ahead for that outcome; rate = this / (this + "
            "misses)",
        ),
    ] = 0
    num_cache_misses: Annotated[
        int,
        Metric(
            "speculation_cache_misses",
            "Asks of an outcome that a drafter had not drafted ahead for, though it had for others",
        ),
    ] = 0
    num_ahead_tokens: int = 0  # tokens drafted by running ahead, used or not
    graphs: GraphCounts = field(default_factory=GraphCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLoad:
    """A drafter's load."""

    num_sessions: Annotated[int, Metric("draft_sessions", "Sessions that a drafter holds", is_gauge=True)] = 0
    queue_depth: Annotated[int, Metric("draft_queue_depth", "Asks that a drafter has not answered", is_gauge=True)] = 0
    mean_draft_s: float | None = None  # smoothed time from ask to draft inside the engine; None: no draft yet
    counters: DrafterCounters = field(default_factory=DrafterCounters)
    # of the last update of its own weights, "" before the first; None: it has none, or they are the target's
    weight_version: str | None = None
