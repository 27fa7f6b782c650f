"""Counters of verifiers and drafters, each with its metric, by which `cluster/monitoring` shows it."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.verifier_service.messages.metric import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramCounts:
    """A histogram's state: `counts[i]` values were at most `bounds[i]` and above the bound before it.

    The last count is for values above every bound. Without bounds, nothing was measured.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    total: float = 0.0  # the sum of all values


NO_VALUES = HistogramCounts()


class Histogram:
    """Counts values in buckets with ascending upper `bounds`, as in Prometheus."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.total += value

    def counts(self) -> HistogramCounts:
        """Return the present state."""
        return HistogramCounts(bounds=self._bounds, counts=tuple(self._counts), total=self.total)


@dataclass(slots=True)
class GraphCounts:
    """Counters of a verifier's or a drafter's model since start; all 0 if no step is captured as a CUDA graph."""

    num_graphs: int = 0
    capture_s: float = 0.0
    num_replayed: int = 0
    eager: dict[str, int] = field(default_factory=dict)  # steps that ran without a graph, by reason


@dataclass(slots=True)
class FetchCounts:
    """Counters of a mixture since start, all layers together: distinct experts of each step and layer."""

    num_taken: int = shown(
        "expert_cache_queries",
        "Distinct experts that each layer took in each step, where a mixture's experts lie in host memory",
    )
    num_hits: int = shown(
        "expert_cache_hits",
        "Those of them that were on the device when the layer's gate asked for them, or on their way",
    )
    num_fetched: int = shown(
        "expert_cache_fetches", "Experts copied to the device, those that a layer before foresaw included"
    )


class HandoverCounts(NamedTuple):
    """Requests that came from or went to other verifiers since start, under the names of `EngineCounters`."""

    num_given: int = 0
    num_given_bytes: int = 0
    refused_takes: Mapping[str, int] = {}
    num_taken: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCounts:
    """Drafts that one version of the target's weights verified."""

    weight_version: str
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingCounters:
    """What is counted where drafts are asked for: in another engine, by its plug-in."""

    num_asks: int = 0  # decisions on a draft length, 0 included: one per decoding request and step
    num_asked_tokens: int = 0  # sum of these lengths
    num_bad_frames: int = 0  # malformed frames from drafters
    num_stale_drafts: int = shown("drafts_stale", "Drafts dropped because their round was over")
    num_resyncs: int = shown("draft_resyncs", "Times a drafter asked for a request's whole prefix again")
    fallbacks: dict[str, int] = shown(
        "draft_fallback",
        "Rounds that ended without a usable draft, by reason; the request then decoded plainly",
        by="reason",
    )
    num_state_bytes: dict[str, int] = shown(
        "draft_state_bytes", "Bytes of the target's hidden states sent to drafters, by transport", by="transport"
    )
    num_tensor_fallbacks: int = shown(
        "draft_tensor_fallbacks", "Hidden states that went in frames because their channel was full or had failed"
    )
    idle_s: float = shown(
        "verify_idle_seconds", "Time without a step because every request waited for its draft", default=0.0
    )
    num_extrapolated_steps: int = shown(
        "verify_extrapolated_steps",
        "Steps a quarter larger than all that the cost model had profiled or seen: their cost was extrapolated",
    )
    round_trip_s: HistogramCounts = shown(
        "draft_rtt_seconds", "Time from asking a drafter to its draft, of rounds answered in time", default=NO_VALUES
    )
    lateness_s: HistogramCounts = shown(
        "draft_lateness_seconds", "Arrival of a draft - its deadline, of drafts that missed it", default=NO_VALUES
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters(DraftingCounters):
    """An engine's counters since start."""

    num_steps: int = 0
    num_scheduled_tokens: int = shown("verify_scheduled_tokens", "Tokens computed by the target model, drafts included")
    num_committed_tokens: int = shown("verify_committed_tokens", "Output tokens committed; throughput is its rate")
    num_drafts: int = shown("verify_drafts", "Drafts that a verifier verified")  # that were not empty
    num_draft_tokens: int = shown("verify_draft_tokens", "Draft tokens that a verifier verified")
    num_accepted_tokens: int = shown(
        "verify_accepted_tokens",
        "Draft tokens that a verifier accepted; accepted per position = this / verify_draft_tokens",
    )
    by_version: tuple[VersionCounts, ...] = ()  # of the last versions, the present one last
    num_preemptions: int = shown(
        "num_preemptions", "Times a request's KV was taken away for an older one", has_alias=True
    )
    num_prefix_queried_tokens: int = shown(
        "prefix_cache_queries", "Tokens of admitted requests that were looked up in the prefix cache", has_alias=True
    )
    num_prefix_hit_tokens: int = shown(
        "prefix_cache_hits", "Tokens found in the prefix cache; rate = this / prefix_cache_queries", has_alias=True
    )
    num_given: int = shown("kv_given_requests", "Requests whose KV a verifier gave to another one, to its end")
    num_given_bytes: int = shown(
        "kv_given_bytes",
        "Bytes of KV and hidden states that a verifier sent to others, those of requests that were not taken, too",
    )
    refused_takes: dict[str, int] = shown(
        "kv_refusals", "Requests whose KV a verifier did not give, by why", by="reason"
    )
    num_taken: int = shown("kv_taken_requests", "Requests that came to a verifier with their KV")
    graphs: GraphCounts = field(default_factory=GraphCounts)
    fetches: FetchCounts | None = None  # None: all experts are on the device
    step_s: HistogramCounts = shown(
        "verify_step_seconds",
        "Time of a verifier's step, from scheduling to the last ask for a draft",
        default=NO_VALUES,
    )
    queue_s: HistogramCounts = shown(
        "request_queue_time_seconds",
        "Begin of a request's first step - time the verifier received it",
        has_alias=True,
        default=NO_VALUES,
    )
