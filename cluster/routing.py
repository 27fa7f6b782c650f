"""Where a new request goes, and which drafter drafts for a request: pure functions of reports.

A verifier that does not report, or that drains, gets no new request. Of the others:
1. A request with an `affinity_key` goes where that key's requests went before, so that their common prefix is in the
   KV cache: the verifiers are ranked by a hash of key and verifier (rendezvous hashing: when one joins or leaves, only
   its own keys move), and the first whose load is at most AFFINITY_LOAD_FACTOR times the least load plus
   AFFINITY_SLACK takes it. The bound is what keeps a popular prefix from burying one verifier (Mirrokni et al.,
   "Consistent Hashing with Bounded Loads", 2018, with the least load in place of the mean).
2. Any other request goes to the verifier with the least load.

A request keeps its drafter as long as that one reports, does not drain and has a link from its verifier, which has
not found it failing; otherwise it gets the least loaded of those that do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from outrider.cluster.fleet import (
    Assignment,
    DisabledReason,
    DrafterReport,
    DrafterState,
    FleetSnapshot,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
    VerifierState,
    off,
)
from outrider.cluster.goodput import stable_hash
from outrider.verifier_service.drafting import LOCAL_DRAFTER_ID
from outrider.verifier_service.request import SpeculationPlan

WAITING_WEIGHT = 4.0  # a request in the queue delays the next one more than one that runs
KV_WEIGHT = 16.0  # a full KV cache counts as much as so many running requests
AFFINITY_LOAD_FACTOR = 1.25
AFFINITY_SLACK = 4.0  # in running requests; without it an idle fleet would never keep a prefix together


class NoVerifierError(RuntimeError):
    """No verifier can take the request; the text says how many are known and why they are out."""


def route(snapshot: FleetSnapshot, ask: RouteAsk, now_s: float, policy: RouterPolicy | None = None) -> Assignment:
    """Choose verifier, drafter and draft length for a new request; raise `NoVerifierError` when there is no verifier.

    Replicas are judged as of the snapshot's own time: when the router is away, its silence is not theirs. Loads in a
    snapshot older than `stale_snapshot_s` mean nothing, so requests are then spread by their hash.
    """
    policy = policy or RouterPolicy()
    live = [state for state in snapshot.verifiers if is_fresh(state.reported_s, snapshot.decided_at_s, policy)]
    accepting = [state for state in live if not state.report.draining]
    open_to_it = [state for state in accepting if state.report.verifier_id not in ask.excluded_verifier_ids]
    if not open_to_it:
        raise NoVerifierError(
            f"no verifier for request {ask.request_id!r}: {len(snapshot.verifiers)} known, {len(live)} reporting, "
            f"{len(live) - len(accepting)} draining, {len(accepting) - len(open_to_it)} excluded by the request"
        )
    is_stale = now_s - snapshot.decided_at_s > policy.stale_snapshot_s
    chosen = _choose_verifier(open_to_it, ask, is_stale)
    drafters = [state for state in snapshot.drafters if is_fresh(state.reported_s, snapshot.decided_at_s, policy)]
    plan = _plan_for_ask(chosen, drafters, ask, policy)
    return Assignment(verifier_id=chosen.report.verifier_id, endpoint=chosen.report.endpoint, plan=plan)


def with_assignment(snapshot: FleetSnapshot, assignment: Assignment) -> FleetSnapshot:
    """Count a routed request in the snapshot, so that the next ones do not all follow it before the next report."""
    return replace(
        snapshot,
        verifiers=tuple(
            replace(state, num_assigned=state.num_assigned + (state.report.verifier_id == assignment.verifier_id))
            for state in snapshot.verifiers
        ),
        drafters=tuple(
            replace(state, num_assigned=state.num_assigned + (state.report.drafter_id == assignment.plan.drafter_id))
            for state in snapshot.drafters
        ),
    )


def is_fresh(reported_s: float, now_s: float, policy: RouterPolicy) -> bool:
    return now_s - reported_s <= policy.expire_after_s


def _choose_verifier(verifiers: Sequence[VerifierState], ask: RouteAsk, is_stale: bool) -> VerifierState:
    loads = {state.report.verifier_id: 0.0 if is_stale else _load(state) for state in verifiers}
    if ask.affinity_key is None:
        return min(verifiers, key=lambda state: (loads[state.report.verifier_id], _spread(state, ask.request_id)))
    limit = AFFINITY_LOAD_FACTOR * min(loads.values()) + AFFINITY_SLACK
    within = [state for state in verifiers if loads[state.report.verifier_id] <= limit]
    key = ask.affinity_key
    return max(within, key=lambda state: (_rendezvous(key, state.report.verifier_id), state.report.verifier_id))


def _load(state: VerifierState) -> float:
    report = state.report
    return report.num_running + WAITING_WEIGHT * report.num_waiting + KV_WEIGHT * report.kv_usage + state.num_assigned


def _spread(state: VerifierState, request_id: str) -> tuple[int, str]:
    return (stable_hash(f"{request_id}/{state.report.verifier_id}"), state.report.verifier_id)


def _rendezvous(key: str, verifier_id: str) -> bytes:
    # a checksum like `stable_hash` is linear: of several verifiers some would win more keys than others
    return hashlib.blake2b(f"{key}/{verifier_id}".encode(), digest_size=8).digest()


def _plan_for_ask(
    verifier: VerifierState, drafters: Sequence[DrafterState], ask: RouteAsk, policy: RouterPolicy
) -> SpeculationPlan:
    cap = ask.num_speculative_tokens
    if cap == 0:
        return off(DisabledReason.REQUEST_OPT_OUT)
    default = verifier.default_plan
    if default.draft_length == 0:
        return default
    desk = DrafterDesk(drafters, verifier.report, policy)
    chosen = desk.choose(ask.request_id, None)
    if chosen is None:
        return off(desk.reason)
    length = min(default.draft_length, chosen.report.max_draft_length)
    return SpeculationPlan(
        drafter_id=chosen.report.drafter_id, draft_length=length if cap is None else min(length, cap)
    )


class DrafterDesk:
    """Hand out one verifier's drafters: a request keeps the one it has, any other gets the least loaded.

    Only drafters that report, that do not drain and that the verifier can use count, and one of its own.
    """

    def __init__(self, live: Iterable[DrafterState], verifier: VerifierReport, policy: RouterPolicy) -> None:
        up = set(verifier.drafters_up)
        usable = (state for state in live if state.report.drafter_id in up and not state.report.draining)
        self.linked = {state.report.drafter_id: state for state in (*usable, *_own_drafters(verifier))}
        self.open = [state for state in self.linked.values() if state.report.queue_depth <= policy.max_queue_depth]
        self.reason = DisabledReason.DRAFT_QUEUE if self.linked else DisabledReason.DRAFTER_UNAVAILABLE
        self._load = {
            state.report.drafter_id: state.report.num_sessions + state.report.queue_depth + state.num_assigned
            for state in self.open
        }

    def choose(self, request_id: str, current_id: str | None) -> DrafterState | None:
        """Return the request's drafter, or None for the `reason`."""
        if current_id in self.linked:
            return self.linked[current_id]
        if not self.open:
            return None
        chosen = min(self.open, key=lambda state: self._rank(state, request_id))
        self._load[chosen.report.drafter_id] += 1
        return chosen

    def _rank(self, state: DrafterState, request_id: str) -> tuple[int, int, str]:
        drafter_id = state.report.drafter_id
        return (self._load[drafter_id], stable_hash(f"{request_id}/{drafter_id}"), drafter_id)


def _own_drafters(verifier: VerifierReport) -> list[DrafterState]:
    """Return the drafter in the verifier's own process as if it reported; it drafts between two steps."""
    if verifier.own_draft_length == 0:
        return []
    report = DrafterReport(
        drafter_id=LOCAL_DRAFTER_ID,
        endpoint="",
        epoch=verifier.epoch,
        num_sessions=0,
        queue_depth=0,
        max_draft_length=verifier.own_draft_length,
        mean_draft_s=0.0,
    )
    return [DrafterState(report=report, reported_s=0.0)]
