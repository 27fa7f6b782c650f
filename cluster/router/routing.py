"""Where a new request goes, and which drafter drafts for a request: pure functions of reports.

A verifier that does not report, or that drains, gets no new request. Of the others:
1. A request with an `affinity_key` goes where that key's requests went before, so that their common prefix is in the
   KV cache: the verifiers are ranked by a hash of key and verifier (rendezvous hashing: when one joins or leaves, only
   its own keys move), and the first whose load is at most AFFINITY_LOAD_FACTOR times the least load plus
   AFFINITY_SLACK takes it. The bound is what keeps a popular prefix from burying one verifier (Mirrokni et al.,
   "Consistent Hashing with Bounded Loads", 2018, with the least load in place of the mean).
2. Any other request goes to the verifier with the least load. The price of a draft token is part of that load: where
   it is near 1 the machine is compute-bound, and one more request slows all others down.

A request keeps its drafter as long as that one reports, does not drain and has a link from its verifier, which has
not found it failing. Otherwise it gets one of the pool in which a token takes least: a step and a draft's round trip,
over one and the tokens that this pool brings per round. Of that pool's drafters it gets the one with the shortest
expected delay: its requests times the round trip on this link, per draft that comes in time. Of a drafter with too long
a queue, or of a pool that is clearly worse than another, each verifier takes one request away per report.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from outrider.cluster.router.fleet import (
    UNKNOWN_POOL,
    Assignment,
    DrafterReport,
    DrafterState,
    FleetSnapshot,
    PlacementReason,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
    VerifierState,
    off,
)
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.engine import DrafterPerformance
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan

WAITING_WEIGHT = 4.0  # a request in the queue delays the next one more than one that runs
KV_WEIGHT = 16.0  # a full KV cache counts as much as so many running requests: beyond it they are preempted
PRICE_WEIGHT = 8.0  # so does a price of 1: compute-bound, one more request slows all others down
AFFINITY_LOAD_FACTOR = 1.25  # times the least load: a cached prefix saves less than a longer wait would cost
AFFINITY_SLACK = 4.0  # in running requests; without it an idle fleet would never keep a prefix together
MIN_ROUND_TRIP_S = 0.001  # shorter ones do not tell drafters apart
WORSE_POOL = 1.25  # times the time per token in the best pool: requests leave it; less is what loads do to either
MIN_SHARE_IN_TIME = 0.1  # of a drafter's drafts: with less it seems ten times as slow as it is, and no slower


_Ranked = tuple[float, float, int, str, int]  # time per token, delay, hash of the link, drafter, its requests


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
    chosen, reason = _choose_verifier(open_to_it, ask, is_stale)
    drafters = [state for state in snapshot.drafters if is_fresh(state.reported_s, snapshot.decided_at_s, policy)]
    plan = _plan_for_ask(chosen, drafters, ask, policy)
    report = chosen.report
    return Assignment(verifier_id=report.verifier_id, endpoint=report.endpoint, plan=plan, reason=reason)


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


def stable_hash(text: str) -> int:
    """Return a hash that is the same in every process (Python's own is salted)."""
    return zlib.crc32(text.encode())


def is_fresh(reported_s: float, now_s: float, policy: RouterPolicy) -> bool:
    return now_s - reported_s <= policy.expire_after_s


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


def _load(state: VerifierState, ask: RouteAsk) -> float:
    """Return a verifier's load in running requests; an urgent request is not held up by those that wait."""
    report = state.report
    num_ahead = 0 if ask.priority < 0 else report.load.num_waiting
    price = min(1.0, state.price or 0.0)
    used = WAITING_WEIGHT * num_ahead + KV_WEIGHT * report.load.kv_usage + PRICE_WEIGHT * price
    return report.load.num_running + used + state.num_assigned


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
    chosen = desk.choose(None)
    if chosen is None:
        return off(desk.reason)
    length = min(default.draft_length, chosen.report.max_draft_length)
    length = length if cap is None else min(length, cap)
    return replace(default, drafter_id=chosen.report.drafter_id, draft_length=length)


class DrafterDesk:
    """Hand out one verifier's drafters: a request keeps the one it has, any other gets the best pool's least busy one.

    Only drafters that report, that do not drain and that the verifier can use count, and one of its own.
    """

    def __init__(self, live: Iterable[DrafterState], verifier: VerifierReport, policy: RouterPolicy) -> None:
        up = set(verifier.drafters_up)
        usable = (state for state in live if state.report.drafter_id in up and not state.report.draining)
        self.linked = {state.report.drafter_id: state for state in (*usable, *_own_drafters(verifier))}
        self.reason = DisabledReason.DRAFT_QUEUE if self.linked else _why_nobody(verifier)
        # per draft in time: one that comes late is none
        self._round_trips_s = {
            known.drafter_id: max(known.round_trip_s, MIN_ROUND_TRIP_S) / max(1.0 - known.late_share, MIN_SHARE_IN_TIME)
            for known in verifier.load.drafters
        }
        # of a link that was never used the best is hoped, or it never would be
        self._hoped_s = min((self._round_trips_s.get(id_, math.inf) for id_ in self.linked), default=math.inf)
        self._pools_s = self._token_times(verifier)
        self._worse = self._worse_pools()
        self.preferred = frozenset(id_ for id_, state in self.linked.items() if state.report.pool not in self._worse)
        self._crowded = {
            id_ for id_, state in self.linked.items() if state.report.load.queue_depth > policy.max_queue_depth
        }
        self._open = [
            self._ranked(state, _num_requests(state), verifier.verifier_id)
            for id_, state in self.linked.items()
            if id_ not in self._crowded
        ]
        heapq.heapify(self._open)

    def choose(self, current_id: str | None) -> DrafterState | None:
        """Return a request's drafter, given the one it has, or None for the `reason`."""
        if current_id in self.linked and not self._should_leave(current_id):
            return self.linked[current_id]
        if not self._open:
            return None
        token_s, _, spread, drafter_id, load = self._open[0]
        heapq.heapreplace(self._open, (token_s, self._delay(drafter_id, load + 1), spread, drafter_id, load + 1))
        return self.linked[drafter_id]

    def _should_leave(self, drafter_id: str) -> bool:
        """Return whether a request should leave the drafter it has; others that have it may stay this time."""
        if not self._open:
            return False
        if drafter_id in self._crowded:
            self._crowded.remove(drafter_id)
            return True
        pool, best = (self.linked[id_].report.pool for id_ in (drafter_id, self._open[0][3]))
        if pool not in self._worse or best in self._worse:
            return False
        self._worse.remove(pool)
        return True

    def _worse_pools(self) -> set[str]:
        """Return the pools that are clearly worse than another."""
        best_s = min(self._pools_s.values(), default=0.0)
        return {pool for pool, token_s in self._pools_s.items() if token_s > WORSE_POOL * best_s}

    def _ranked(self, state: DrafterState, load: int, verifier_id: str) -> _Ranked:
        drafter_id, pool = state.report.drafter_id, state.report.pool
        spread = stable_hash(f"{verifier_id}/{drafter_id}")
        return (self._pools_s[pool], self._delay(drafter_id, load), spread, drafter_id, load)

    def _delay(self, drafter_id: str, load: int) -> float:
        """Return how long a drafter with `load` requests lets one more wait, but for a constant."""
        hoped_s = MIN_ROUND_TRIP_S if self._hoped_s == math.inf else self._hoped_s
        return (load + 1) * self._round_trips_s.get(drafter_id, hoped_s)

    def _token_times(self, verifier: VerifierReport) -> dict[str, float]:
        """Return the time per token of a request that has a drafter of each pool, while nobody waits there.

        All are alike as long as it is not known which drafters are of which pool: a router may have just started.
        """
        shortest_s: dict[str, float] = {}
        for drafter_id, state in self.linked.items():
            delay_s = self._delay(drafter_id, load=0)
            shortest_s[state.report.pool] = min(delay_s, shortest_s.get(state.report.pool, math.inf))
        if UNKNOWN_POOL in shortest_s:
            return dict.fromkeys(shortest_s, 0.0)
        yields, step_s = _yields(self.linked, verifier.load.drafters), verifier.load.mean_step_s or 0.0
        return {pool: (step_s + delay_s) / (1.0 + yields[pool]) for pool, delay_s in shortest_s.items()}


def _yields(linked: Mapping[str, DrafterState], served: Iterable[DrafterPerformance]) -> dict[str, float]:
    """Return the accepted tokens per round of every pool; of one that had no rounds lately whole drafts are hoped."""
    known: dict[str, list[float]] = {}
    for drafter in served:
        if drafter.drafter_id in linked and drafter.accepted_per_round is not None:
            known.setdefault(linked[drafter.drafter_id].report.pool, []).append(drafter.accepted_per_round)
    hoped = {state.report.pool: float(state.report.max_draft_length) for state in linked.values()}
    return hoped | {pool: sum(values) / len(values) for pool, values in known.items()}


def _why_nobody(verifier: VerifierReport) -> DisabledReason:
    is_failed = any(circuit.is_open for circuit in verifier.load.circuits)
    return DisabledReason.DRAFTER_TIMEOUT if is_failed else DisabledReason.DRAFTER_UNAVAILABLE


def _num_requests(state: DrafterState) -> int:
    return state.report.load.num_sessions + state.report.load.queue_depth + state.num_assigned


def _own_drafters(verifier: VerifierReport) -> list[DrafterState]:
    """Return the drafter in the verifier's own process as if it reported; it drafts between two steps."""
    if verifier.own_draft_length == 0:
        return []
    report = DrafterReport(
        drafter_id=LOCAL_DRAFTER_ID,
        endpoint="",
        epoch=verifier.epoch,
        max_draft_length=verifier.own_draft_length,
        pool=LOCAL_DRAFTER_ID,
    )
    return [DrafterState(report=report, reported_s=0.0)]
