"""The fleet's load as plain JSON values, for /load, GetLoads and `outrider top`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.cluster.monitoring.learner_load import learner_load
from outrider.cluster.router.fleet import (
    DrafterReport,
    DrafterState,
    FleetSnapshot,
    ReplicaState,
    VerifierReport,
    VerifierState,
)


def fleet_load(snapshot: FleetSnapshot | None, now_s: float) -> dict[str, Any]:
    """Describe a snapshot; without one, the pools are empty and the age is null.

    acceptance_rate         accepted / verified draft tokens, since the verifiers' start; null: none verified yet
    mean_acceptance_length  1 + accepted tokens / verifications with a draft
    tokens_per_s            committed tokens over the last two seconds; per accelerator: ranks of both pools count
    price                   cost of one more draft token, in committed tokens; null: unknown
    knee                    tokens from which a step is compute-bound; null: never, or unknown
    num_extrapolated_steps  steps far larger than any profiled or earlier one: their cost was extrapolated
    draft_length            longest draft of the router's default plan (why: enabled_reason; at 0, disabled_reason)
    num_asks                decisions on the next draft length, one per decoding request and step, since the start
    num_asked_tokens        draft tokens asked for
    draft_length_mean       asked tokens / asks, over the last two seconds
    verify_idle_share       share of the last two seconds in which the verifier waited for drafts
    late_share              late drafts / drafts that arrived; null: none arrived
    mean_lateness_s         by which late drafts missed their deadline
    accepted_per_round      recent accepted tokens per round of a drafter, mean over verifiers
    learners                see `learner_load`
    batch_dependent         parts of the model that give a token other logits beside other requests; null: unknown
    hit_rate                asks answered by running ahead / asks for which it was tried; null: none
    """
    if snapshot is None:
        snapshot = FleetSnapshot(verifiers=(), drafters=(), decided_at_s=now_s)
        age_s = None
    else:
        age_s = max(0.0, now_s - snapshot.decided_at_s)
    drafters = [state.report for state in snapshot.drafters]
    return {
        "age_s": age_s,
        "verifiers": [_verifier(state) for state in snapshot.verifiers],
        "drafters": [_drafter(report, snapshot.verifiers) for report in drafters],
        "totals": _totals(snapshot.verifiers, snapshot.drafters),
        "decisions": [
            {"decision": item.decision, "reason": item.reason, "count": item.count} for item in snapshot.decisions
        ],
        "learners": [learner_load(status) for status in snapshot.learners],
        "placements": [{"reason": item.reason.value, "count": item.count} for item in snapshot.placements],
    }


def _verifier(state: VerifierState) -> dict[str, Any]:
    report = state.report
    return {
        "id": report.verifier_id,
        "state": ReplicaState.of(report).value,
        "role": report.role.value,
        "batch_dependent": None if report.batch_dependent is None else list(report.batch_dependent),
        "num_running": report.load.num_running,
        "num_waiting": report.load.num_waiting,
        "kv_usage": report.load.kv_usage,
        "weight_version": report.load.weight_version,
        "weights_digest": report.load.weights_digest,
        "weights_error": report.load.weights_error,
        "is_paused": report.load.is_paused,
        "tokens_per_s": report.load.tokens_per_s,
        "mean_step_s": report.load.mean_step_s,
        "price": state.price,
        "knee": report.load.knee,
        "num_extrapolated_steps": report.load.counters.num_extrapolated_steps,
        "draft_length": state.default_plan.draft_length,
        "enabled_reason": state.default_plan.enabled_reason,
        "disabled_reason": state.default_plan.disabled_reason,
        "num_asks": report.load.counters.num_asks,
        "num_asked_tokens": report.load.counters.num_asked_tokens,
        "draft_length_mean": report.load.draft_length_mean,
        "verify_idle_share": report.load.verify_idle_share,
        **_lateness(report),
        **_acceptance([state]),
    }


def _lateness(report: VerifierReport) -> dict[str, float | None]:
    lateness_s = report.load.counters.lateness_s
    num_late = sum(lateness_s.counts)
    num_drafts = num_late + sum(report.load.counters.round_trip_s.counts)
    return {
        "late_share": num_late / num_drafts if num_drafts else None,
        "mean_lateness_s": lateness_s.total / num_late if num_late else None,
    }


def _drafter(report: DrafterReport, verifiers: tuple[VerifierState, ...]) -> dict[str, Any]:
    circuits = [
        circuit.state
        for state in verifiers
        for circuit in state.report.load.circuits
        if circuit.drafter_id == report.drafter_id
    ]
    return {
        "id": report.drafter_id,
        "pool": report.pool,
        "state": ReplicaState.of(report).value,
        "num_sessions": report.load.num_sessions,
        "queue_depth": report.load.queue_depth,
        "mean_draft_s": report.load.mean_draft_s or 0.0,
        "hit_rate": _hit_rate([report]),
        "accepted_per_round": _mean_yield(report.drafter_id, verifiers),
        "num_links_up": sum(report.drafter_id in state.report.drafters_up for state in verifiers),
        "num_circuits_open": sum(circuit != "closed" for circuit in circuits),
    }


def _mean_yield(drafter_id: str, verifiers: tuple[VerifierState, ...]) -> float | None:
    found = [
        known.accepted_per_round
        for state in verifiers
        for known in state.report.load.drafters
        if known.drafter_id == drafter_id and known.accepted_per_round is not None
    ]
    return sum(found) / len(found) if found else None


def _totals(verifiers: tuple[VerifierState, ...], drafters: tuple[DrafterState, ...]) -> dict[str, Any]:
    reports = [state.report for state in verifiers]
    return {
        "num_running": sum(report.load.num_running for report in reports),
        "num_waiting": sum(report.load.num_waiting for report in reports),
        "tokens_per_s": sum(report.load.tokens_per_s for report in reports),
        "tokens_per_s_per_accelerator": tokens_per_accelerator(verifiers, drafters),
        "num_draft_sessions": sum(state.report.load.num_sessions for state in drafters),
        "hit_rate": _hit_rate([state.report for state in drafters]),
        **_acceptance(verifiers),
    }


def tokens_per_accelerator(verifiers: Sequence[VerifierState], drafters: Sequence[DrafterState]) -> float | None:
    """Return committed tokens per second and rank, over both pools' ranks; None without ranks."""
    num_ranks = sum(state.report.num_ranks for state in verifiers)
    num_ranks += sum(state.report.num_ranks for state in drafters)
    return sum(state.report.load.tokens_per_s for state in verifiers) / num_ranks if num_ranks else None


def _hit_rate(reports: Sequence[DrafterReport]) -> float | None:
    num_hits = sum(report.load.counters.num_cache_hits for report in reports)
    num_asks = num_hits + sum(report.load.counters.num_cache_misses for report in reports)
    return num_hits / num_asks if num_asks else None


def _acceptance(verifiers: tuple[VerifierState, ...] | list[VerifierState]) -> dict[str, float | None]:
    counters = [state.report.load.counters for state in verifiers]
    num_drafts = sum(item.num_drafts for item in counters)
    num_draft_tokens = sum(item.num_draft_tokens for item in counters)
    num_accepted = sum(item.num_accepted_tokens for item in counters)
    return {
        "acceptance_rate": num_accepted / num_draft_tokens if num_draft_tokens else None,
        "mean_acceptance_length": 1 + num_accepted / num_drafts if num_drafts else None,
    }
