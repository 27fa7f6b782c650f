"""Where a new request goes: a pure function of the reports.

Every gateway calls it for its own requests, with the router's news and its own counts (`FleetView`). A verifier gets no
new request if it drains, or lacks the weights that the fleet took last. Of the others:
1. A request with an `affinity_key` goes where that key's requests went before, so that their common prefix is in the
   KV cache. The verifiers are ranked by a hash of key and verifier (rendezvous hashing: when one joins or leaves, only
   its own keys move); the first whose load is at most AFFINITY_LOAD_FACTOR times the least load plus AFFINITY_SLACK
   takes it. The bound keeps a popular prefix from burying one verifier (Mirrokni et al., "Consistent Hashing with
   Bounded Loads", 2018, with the least load in place of the mean).
2. Any other request goes to the verifier with the least load. The price of a draft token is part of that load: near 1
   the machine is compute-bound, and one more request slows all others down.

Where verifiers have roles, a long prompt is computed at one of role `prefill`, chosen by the same two rules, and
decoded at another verifier. Roles are preferences: without a verifier of its role, any other one does the work.

What runs may move on: while requests wait at a verifier and another one has room, running ones go there with their KV,
one at a time (Sun et al., "Llumnix", 2024). So a verifier that has joined is of use to those that came before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from outrider.cluster.router.drafter_assignment import stable_hash
from outrider.cluster.router.fleet import (
    Assignment,
    FleetSnapshot,
    FleetWeights,
    PlacementReason,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
    VerifierRole,
    VerifierState,
)
from outrider.cluster.router.planning import plan_arrival

WAITING_WEIGHT = 4.0  # a queued request delays the next one more than a running one does
KV_WEIGHT = 16.0  # running requests that a full KV cache counts as: beyond it they are preempted
PRICE_WEIGHT = 8.0  # running requests that a price of 1 counts as: compute-bound, one more slows all others down
AFFINITY_LOAD_FACTOR = 1.25  # times the least load: a cached prefix saves less than a longer wait would cost
AFFINITY_SLACK = 4.0  # in running requests; without it an idle fleet would never keep a prefix together
MAX_TAKER_KV = 0.5  # used share of KV blocks up to which a verifier takes running requests of a crowded one


class NoVerifierError(RuntimeError):
    """No verifier can take the request; the text says how many are known and why they are out."""


def route(snapshot: FleetSnapshot, ask: RouteAsk, now_s: float, policy: RouterPolicy | None = None) -> Assignment:
    """Choose verifier, drafter and draft length for a new request; raise `NoVerifierError` when there is no verifier.

    Loads of a snapshot older than `stale_snapshot_s` are outdated: requests are then spread by their hash.
    """
    policy = policy or RouterPolicy()
    accepting = [state for state in snapshot.verifiers if not state.report.draining]
    weights = FleetWeights.of(state.report for state in snapshot.verifiers)
    known = [state for state in accepting if state.report.follows(snapshot.pause)]
    current = [state for state in known if state.report.serves(weights)]
    eligible = [state for state in current if state.report.verifier_id not in ask.excluded_verifier_ids]
    if not eligible:
        raise NoVerifierError(
            f"no verifier for request {ask.request_id!r}: {len(snapshot.verifiers)} known, "
            f"{len(snapshot.verifiers) - len(accepting)} draining, {len(accepting) - len(current)} that have not "
            f"followed the fleet's weights or pause, {len(current) - len(eligible)} excluded by the request"
        )
    is_stale = now_s - snapshot.decided_at_s > policy.stale_snapshot_s
    for_decode = [state for state in eligible if state.report.role is not VerifierRole.PREFILL]
    chosen, reason = _choose_verifier(for_decode or eligible, ask, is_stale)
    prefill = _choose_prefill(eligible, chosen, ask, is_stale, policy)
    plan = plan_arrival(chosen, snapshot.drafters, ask, policy)
    report = chosen.report
    return Assignment(
        verifier_id=report.verifier_id,
        endpoint=report.endpoint,
        plan=plan,
        reason=reason,
        prefill_verifier_id=None if prefill is None else prefill.report.verifier_id,
        prefill_endpoint="" if prefill is None else prefill.report.endpoint,
    )


def missed_weights(reports: Sequence[VerifierReport], report: VerifierReport) -> FleetWeights | None:
    """Return the fleet's weights if a verifier has none but those it started with, and can read them."""
    weights = FleetWeights.of(reports)
    is_behind = weights is not None and weights.folder is not None and report.load.weights_taken_s == 0.0
    return weights if is_behind else None


def takers_of(report: VerifierReport, verifiers: Sequence[VerifierState]) -> list[VerifierState]:
    """Return the other verifiers that take requests, and have the weights that a verifier's KV is of."""
    weights = FleetWeights.of([report])
    others = (state for state in verifiers if state.report.verifier_id != report.verifier_id)
    return [other for other in others if not other.report.draining and other.report.serves(weights)]


def is_crowded(report: VerifierReport, takers: Sequence[VerifierState]) -> bool:
    """Return whether requests wait at a verifier, and one of the others could take a running one and start it at once.

    That one runs fewer requests even with one more: so no request goes to and fro.
    """
    if report.load.num_waiting == 0 or report.draining or report.role is VerifierRole.PREFILL:
        return False
    decode = [taker for taker in takers if taker.report.role is not VerifierRole.PREFILL]
    idle = [taker for taker in decode if taker.report.load.num_waiting == 0]
    return any(
        taker.report.load.num_running + taker.report.num_pending + 1 < report.load.num_running
        and taker.report.load.kv_usage <= MAX_TAKER_KV
        for taker in idle
    )


def _choose_verifier(
    verifiers: Sequence[VerifierState], ask: RouteAsk, is_stale: bool
) -> tuple[VerifierState, PlacementReason]:
    loads = [0.0 if is_stale else _load(state, ask) for state in verifiers]
    least = min(loads)
    if ask.affinity_key is None:
        tied = [state for state, load in zip(verifiers, loads, strict=True) if load == least]
        chosen = min(tied, key=lambda state: _spread(state, ask.request_id))
        reason = PlacementReason.SPREAD if is_stale else PlacementReason.LEAST_LOAD
    else:
        limit = AFFINITY_LOAD_FACTOR * least + AFFINITY_SLACK
        key = ask.affinity_key
        ids = (state.report.verifier_id for state in verifiers)
        ranks = [(_rendezvous(key, verifier_id), verifier_id) for verifier_id in ids]
        place = max((place for place, load in enumerate(loads) if load <= limit), key=ranks.__getitem__)
        chosen = verifiers[place]
        reason = PlacementReason.PREFIX if ranks[place] == max(ranks) else PlacementReason.SPILL
    return chosen, PlacementReason.ONLY if len(verifiers) == 1 else reason


def _choose_prefill(
    verifiers: Sequence[VerifierState], chosen: VerifierState, ask: RouteAsk, is_stale: bool, policy: RouterPolicy
) -> VerifierState | None:
    """Choose who computes the prompt for the chosen verifier; None: it does so itself."""
    is_long = ask.num_prompt_tokens >= policy.min_handover_tokens
    if not ask.may_hand_over or not is_long or chosen.report.role is VerifierRole.PREFILL:
        return None
    for_prefill = [state for state in verifiers if state.report.role is VerifierRole.PREFILL]
    return _choose_verifier(for_prefill, ask, is_stale)[0] if for_prefill else None


def _load(state: VerifierState, ask: RouteAsk) -> float:
    """Return a verifier's load in running requests; an urgent request overtakes the queue."""
    report = state.report
    num_ahead = 0 if ask.priority < 0 else report.load.num_waiting
    price = min(1.0, state.price or 0.0)
    used = WAITING_WEIGHT * num_ahead + KV_WEIGHT * report.load.kv_usage + PRICE_WEIGHT * price
    return report.load.num_running + report.num_pending + state.num_assigned + used


def _spread(state: VerifierState, request_id: str) -> tuple[int, str]:
    return (stable_hash(f"{request_id}/{state.report.verifier_id}"), state.report.verifier_id)


def _rendezvous(key: str, verifier_id: str) -> bytes:
    # `stable_hash` is a linear checksum: some verifiers would win more keys than others
    return hashlib.blake2b(f"{key}/{verifier_id}".encode(), digest_size=8).digest()
