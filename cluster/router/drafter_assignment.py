"""Which drafter drafts for a request of one verifier.

A request keeps its drafter while that one reports, does not drain, and has a link from the verifier whose circuit
breaker is closed. Otherwise it goes to the pool with the least time per token: a step and a draft's round trip,
divided by one and the accepted tokens per round of this pool. Within the pool it goes to the drafter with the shortest
expected delay: that drafter's requests times the round trip on this link, per draft that comes in time.

A drafter whose queue is too long, and a pool that is clearly worse than another, lose one request per verifier and
report.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Iterable, Mapping

from outrider.cluster.router.fleet import UNKNOWN_POOL, DrafterReport, DrafterState, RouterPolicy, VerifierReport
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.engine import DrafterPerformance
from outrider.verifier_service.messages.request import DisabledReason

MIN_ROUND_TRIP_S = 0.001  # shorter ones do not tell drafters apart
WORSE_POOL = 1.25  # times the time per token in the best pool: requests leave it; load alone moves either by less
MIN_SHARE_IN_TIME = 0.1  # of a drafter's drafts: below it a drafter seems ten times as slow as it is, and no slower

_Ranked = tuple[float, float, int, str, int]  # time per token, delay, hash of the link, drafter, its requests


def stable_hash(text: str) -> int:
    """Return a hash that is the same in every process (Python's own is salted)."""
    return zlib.crc32(text.encode())


class DrafterAssigner:
    """Assign drafters to one verifier's requests; each assignment counts as load for the next.

    Usable are drafters that report, do not drain and are up at this verifier, and the drafter in its own process.
    """

    def __init__(self, live: Iterable[DrafterState], verifier: VerifierReport, policy: RouterPolicy) -> None:
        up = set(verifier.drafters_up)
        usable = (state for state in live if state.report.drafter_id in up and not state.report.draining)
        self.usable = {state.report.drafter_id: state for state in (*usable, *_own_drafters(verifier))}
        self.reason = DisabledReason.DRAFT_QUEUE if self.usable else _reason_for_none(verifier)
        # per draft in time: a late draft counts as none
        self._round_trips_s = {
            known.drafter_id: max(known.round_trip_s, MIN_ROUND_TRIP_S) / max(1.0 - known.late_share, MIN_SHARE_IN_TIME)
            for known in verifier.load.drafters
        }
        # prior of an unused link: the best of the others, so that it is tried
        used = [self._round_trips_s[id_] for id_ in self.usable if id_ in self._round_trips_s]
        self._prior_s = min(used, default=MIN_ROUND_TRIP_S)
        self._token_times_s = self._times_per_token(verifier)
        best_s = min(self._token_times_s.values(), default=0.0)
        self._worse = {pool for pool, token_s in self._token_times_s.items() if token_s > WORSE_POOL * best_s}
        self._crowded = {
            id_ for id_, state in self.usable.items() if state.report.load.queue_depth > policy.max_queue_depth
        }
        self._open = [
            self._ranked(state, _num_requests(state), verifier.verifier_id)
            for id_, state in self.usable.items()
            if id_ not in self._crowded
        ]
        heapq.heapify(self._open)

    def assign(self, current_id: str | None) -> DrafterState | None:
        """Return a request's drafter, given its current one; None: it gets none, for the `reason`."""
        if current_id in self.usable and not (self._open and self._release_one(current_id)):
            return self.usable[current_id]
        if not self._open:
            return None
        token_s, _, spread, drafter_id, load = self._open[0]
        heapq.heapreplace(self._open, (token_s, self._delay(drafter_id, load + 1), spread, drafter_id, load + 1))
        return self.usable[drafter_id]

    def _release_one(self, drafter_id: str) -> bool:
        """Take a request from a crowded drafter or a worse pool, once each; return whether it was taken."""
        if drafter_id in self._crowded:
            self._crowded.remove(drafter_id)
            return True
        pool, best = (self.usable[id_].report.pool for id_ in (drafter_id, self._open[0][3]))
        if pool not in self._worse or best in self._worse:
            return False
        self._worse.remove(pool)
        return True

    def _ranked(self, state: DrafterState, load: int, verifier_id: str) -> _Ranked:
        drafter_id, pool = state.report.drafter_id, state.report.pool
        spread = stable_hash(f"{verifier_id}/{drafter_id}")
        return (self._token_times_s[pool], self._delay(drafter_id, load), spread, drafter_id, load)

    def _delay(self, drafter_id: str, load: int) -> float:
        """Return the delay of one more request at a drafter with `load` requests, up to a constant factor."""
        return (load + 1) * self._round_trips_s.get(drafter_id, self._prior_s)

    def _times_per_token(self, verifier: VerifierReport) -> dict[str, float]:
        """Return each pool's time per token of a request, without a queue.

        All are equal while a drafter's pool is unknown: the router has just started.
        """
        shortest_s: dict[str, float] = {}
        for drafter_id, state in self.usable.items():
            delay_s = self._delay(drafter_id, load=0)
            shortest_s[state.report.pool] = min(delay_s, shortest_s.get(state.report.pool, math.inf))
        if UNKNOWN_POOL in shortest_s:
            return dict.fromkeys(shortest_s, 0.0)
        yields, step_s = _yields(self.usable, verifier.load.drafters), verifier.load.mean_step_s or 0.0
        return {pool: (step_s + delay_s) / (1.0 + yields[pool]) for pool, delay_s in shortest_s.items()}


def _yields(usable: Mapping[str, DrafterState], served: Iterable[DrafterPerformance]) -> dict[str, float]:
    """Return every pool's accepted tokens per round; the prior, without recent rounds, is the longest draft."""
    known: dict[str, list[float]] = {}
    for drafter in served:
        if drafter.drafter_id in usable and drafter.accepted_per_round is not None:
            known.setdefault(usable[drafter.drafter_id].report.pool, []).append(drafter.accepted_per_round)
    priors = {state.report.pool: float(state.report.max_draft_length) for state in usable.values()}
    return priors | {pool: sum(values) / len(values) for pool, values in known.items()}


def _reason_for_none(verifier: VerifierReport) -> DisabledReason:
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
