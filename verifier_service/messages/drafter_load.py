"""How busy a drafter is, and what happened at it."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.verifier_service.messages.graph_counts import GraphCounts


@dataclass(slots=True)
class DrafterCounters:
    """What happened at a drafter since its start."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_resyncs: int = 0
    num_superseded_rounds: int = 0
    num_evicted_sessions: int = 0
    num_expired_sessions: int = 0
    num_bad_messages: int = 0
    num_cache_hits: int = 0  # asks answered at once: what they follow had been drafted for
    num_cache_misses: int = 0  # asks that follow what had not, of sessions that were prepared for something
    num_ahead_tokens: int = 0  # computed in spare time, used or not
    graphs: GraphCounts = field(default_factory=GraphCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLoad:
    """How busy a drafter is."""

    num_sessions: int = 0
    queue_depth: int = 0  # unanswered asks
    mean_draft_s: float | None = None  # smoothed time from ask to draft inside the engine; None: nothing drafted yet
    counters: DrafterCounters = field(default_factory=DrafterCounters)
