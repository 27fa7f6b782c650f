"""The counters of a load report that our own engine and vLLM share."""

from __future__ import annotations

from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.step_stats import StepStats
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.engine import DrafterCircuit, EngineCounters, VersionCounts
from outrider.verifier_service.pricing.draft_pricing import DraftPricing


def counters_of(
    stats: StepStats, drafting: DraftCoordinator, pricing: DraftPricing, drafts: RelayDraftClient
) -> EngineCounters:
    """Return the counters of steps, drafting and links; the scheduler's own counters stay 0."""
    return EngineCounters(
        num_steps=stats.num_steps,
        num_scheduled_tokens=stats.num_scheduled_tokens,
        num_committed_tokens=stats.num_committed_tokens,
        num_drafts=stats.num_drafts,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        by_version=tuple(
            VersionCounts(
                weight_version=version,
                num_draft_tokens=counts.num_draft_tokens,
                num_accepted_tokens=counts.num_accepted_tokens,
            )
            for version, counts in stats.by_version.items()
        ),
        num_asks=drafting.num_asks,
        num_asked_tokens=drafting.num_asked_tokens,
        num_bad_frames=drafts.num_bad_frames,
        num_stale_drafts=drafting.num_stale_drafts,
        num_resyncs=drafting.num_resyncs,
        fallbacks=dict(drafting.fallbacks),
        num_state_bytes=dict(drafts.num_state_bytes),
        num_tensor_fallbacks=drafts.num_tensor_fallbacks,
        idle_s=stats.idle_s,
        num_extrapolated_steps=pricing.num_extrapolated_steps,
        graphs=stats.graphs,
        fetches=stats.fetches,
        step_s=stats.step_s.counts(),
        queue_s=stats.queue_s.counts(),
        round_trip_s=drafting.round_trip_s.counts(),
        lateness_s=drafting.lateness_s.counts(),
    )


def circuits_of(drafting: DraftCoordinator, now_s: float) -> tuple[DrafterCircuit, ...]:
    """Return the state of the circuit breaker in front of every drafter that is up."""
    states = drafting.circuits(now_s)
    return tuple(DrafterCircuit(drafter_id=drafter_id, state=state.value) for drafter_id, state in states.items())
