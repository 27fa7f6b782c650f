"""A snapshot of two verifiers and two drafters in which every figure is set and no two are equal by accident."""

from __future__ import annotations

from fakes.reports import verifier_report
from outrider.cluster.router.fleet import (
    DecisionCount,
    DrafterReport,
    DrafterState,
    FleetSnapshot,
    PlacementCount,
    PlacementReason,
    VerifierState,
)
from outrider.drafter_service.learning.messages import LearnerStatus, Phase, VersionRecord
from outrider.verifier_service.messages.counts import FetchCounts, GraphCounts, HistogramCounts, VersionCounts
from outrider.verifier_service.messages.drafter_load import DrafterCounters, DrafterLoad
from outrider.verifier_service.messages.engine import DrafterCircuit, DrafterPerformance, EngineCounters
from outrider.verifier_service.messages.request import DisabledReason, EnabledReason, SpeculationPlan

DECIDED_AT_S = 1000.0
COUNTERS = EngineCounters(
    num_steps=50,
    num_scheduled_tokens=400,
    num_committed_tokens=300,
    num_drafts=40,
    num_draft_tokens=120,
    num_accepted_tokens=90,
    by_version=(
        VersionCounts(weight_version="v6", num_draft_tokens=80, num_accepted_tokens=72),
        VersionCounts(weight_version="v7", num_draft_tokens=40, num_accepted_tokens=18),
    ),
    num_preemptions=2,
    num_prefix_queried_tokens=640,
    num_prefix_hit_tokens=320,
    num_stale_drafts=3,
    num_resyncs=5,
    num_state_bytes={"gloo": 4096},
    num_given=3,
    num_given_bytes=1 << 20,
    refused_takes={"other_weights": 2},
    num_taken=1,
    num_tensor_fallbacks=2,
    fallbacks={"timeout": 7, "bad_draft": 1},
    idle_s=1.5,
    num_extrapolated_steps=4,
    graphs=GraphCounts(num_graphs=51, capture_s=3.5, num_replayed=46, eager={"many_tokens": 4}),
    fetches=FetchCounts(num_taken=70, num_hits=60, num_fetched=25),
    num_asks=48,
    num_asked_tokens=120,
    step_s=HistogramCounts(bounds=(0.01, 0.1), counts=(30, 15, 5), total=2.5),
    queue_s=HistogramCounts(bounds=(0.01, 0.1), counts=(4, 3, 1), total=0.75),
    round_trip_s=HistogramCounts(bounds=(0.01,), counts=(39, 1), total=0.25),
    lateness_s=HistogramCounts(bounds=(0.01,), counts=(2, 1), total=0.125),
)
BUSY_VERIFIER = verifier_report(
    verifier_id="v0",
    endpoint="v0:1",
    epoch=1,
    num_running=6,
    num_waiting=2,
    num_decoding=5,
    kv_usage=0.625,
    linked_drafters=("d0",),
    drafters=(
        DrafterPerformance(drafter_id="d0", round_trip_s=0.01, accepted_per_round=1.5, num_updates_behind=2),
        DrafterPerformance(drafter_id="look-up", round_trip_s=0.01),
    ),
    tokens_per_s=120.0,
    mean_step_s=0.05,
    counters=COUNTERS,
    circuits=(DrafterCircuit(drafter_id="d0", state="closed"), DrafterCircuit(drafter_id="d1", state="open")),
    num_bad_link_frames=4,
    price=0.5,
    knee=96.0,
    draft_length_mean=2.5,
    verify_idle_share=0.125,
    num_ranks=2,
)
IDLE_VERIFIER = verifier_report(
    verifier_id="v1",
    endpoint="v1:1",
    epoch=1,
    num_running=0,
    num_waiting=0,
    num_decoding=0,
    kv_usage=0.0,
    linked_drafters=("d0", "d1"),
    draining=True,
)
BUSY_DRAFTER = DrafterReport(
    drafter_id="d0",
    endpoint="d0:1",
    epoch=1,
    max_draft_length=8,
    pool="default",
    load=DrafterLoad(
        num_sessions=6,
        queue_depth=1,
        mean_draft_s=0.004,
        counters=DrafterCounters(
            num_drafts=44, num_draft_tokens=132, num_evicted_sessions=1, num_cache_hits=30, num_cache_misses=10
        ),
    ),
    num_bad_frames=9,
)
IDLE_DRAFTER = DrafterReport(
    drafter_id="d1",
    endpoint="d1:1",
    epoch=1,
    max_draft_length=8,
    pool="lookup",
    draining=True,
)


LEARNER = LearnerStatus(
    pool="default",
    phase=Phase.WATCH,
    serving="v4",
    num_samples=37,
    num_bytes=3 << 20,
    num_seen=402,
    num_dropped=13,
    num_steps=150,
    loss=0.875,
    train_s=61.5,
    num_candidates=7,
    num_published=4,
    num_refused=3,
    num_rolled_back=2,
    last_event="v4 serves: in 512 rounds of its trial it named 0.25 tokens more than v2",
    versions=(
        VersionRecord(name="v2", fate="replaced by v4", num_rounds=400, num_draft_tokens=1600, num_named_tokens=700),
        VersionRecord(name="v3", fate="refused: worse on held-out text"),
        VersionRecord(
            name="v4", is_serving=True, fate="serves", num_rounds=80, num_draft_tokens=320, num_named_tokens=160
        ),
    ),
)


def busy_fleet() -> FleetSnapshot:
    """Return v0 (busy, drafting) and v1 (draining, idle, never stepped), d0 (linked to both) and d1 (draining).

    The first pool learns.
    """
    return FleetSnapshot(
        verifiers=(
            VerifierState(
                report=BUSY_VERIFIER,
                reported_s=999.0,
                default_plan=SpeculationPlan(drafter_id="d0", draft_length=3, enabled_reason=EnabledReason.PAYS),
                price=0.25,
            ),
            VerifierState(
                report=IDLE_VERIFIER,
                reported_s=999.5,
                default_plan=SpeculationPlan(disabled_reason=DisabledReason.WARMUP),
            ),
        ),
        drafters=(
            DrafterState(report=BUSY_DRAFTER, reported_s=999.0),
            DrafterState(report=IDLE_DRAFTER, reported_s=999.0),
        ),
        decided_at_s=DECIDED_AT_S,
        decisions=(
            DecisionCount(decision="off", reason="load", count=11),
            DecisionCount(decision="on", reason="pays", count=31),
        ),
        placements=(PlacementCount(reason=PlacementReason.PREFIX, count=42),),
        learners=(LEARNER,),
    )
