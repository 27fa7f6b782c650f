"""A drafter's load and counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.verifier_service.messages.graph_counts import GraphCounts


@dataclass(slots=True)
class DrafterCounters:
    """A drafter's counters since start."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_resyncs: int = 0
    num_superseded_rounds: int = 0
    num_evicted_sessions: int = 0
    num_expired_sessions: int = 0
    num_bad_messages: int = 0
    num_cache_hits: int = 0  # asks answered at once: running ahead had drafted for their outcome
    num_cache_misses: int = 0  # asks of sessions that had run ahead, but for other outcomes
    num_ahead_tokens: int = 0  # tokens drafted by running ahead, used or not
    graphs: GraphCounts = field(default_factory=GraphCounts)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLoad:
    """A drafter's load."""

    num_sessions: int = 0
    queue_depth: int = 0  # unanswered asks
    mean_draft_s: float | None = None  # smoothed time from ask to draft inside the engine; None: no draft yet
    counters: DrafterCounters = field(default_factory=DrafterCounters)
    # of the last update of its own weights, "" before the first; None: it has none, or they are the target's
    weight_version: str | None = None
