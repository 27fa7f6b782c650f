"""The router's state: the last report of every replica, and what it takes to decide without flapping.

Sans I/O: one actor wraps `RouterCore` and passes the clock in. Losing this state loses nothing that the next reports
do not bring back: gateways route by their last snapshot meanwhile, verifiers go on with their last plans. Until all
have reported to a router that has just started, it believes what verifiers say: a drafter that one has a live link to
is there, a request that drafts goes on drafting.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from outrider.cluster.router.fleet import (
    Assignment,
    DecisionCount,
    Directive,
    DrafterReport,
    DrafterState,
    FleetSnapshot,
    PlacementCount,
    PlacementReason,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
    VerifierState,
)
from outrider.cluster.router.planning import VerifierMemory, plan_speculation
from outrider.cluster.router.routing import is_fresh, route
from outrider.verifier_service.messages.link import DrafterEndpoint
from outrider.verifier_service.messages.request import SpeculationPlan


class StaleEpochError(RuntimeError):
    """A report of an incarnation that a newer one has replaced."""


@dataclass(slots=True)
class _Verifier:
    state: VerifierState
    memory: VerifierMemory


class RouterCore:
    """Take in reports, answer verifiers with plans and gateways with assignments.

    Every `now_s` is of one clock that does not run backwards.
    """

    def __init__(self, policy: RouterPolicy | None = None) -> None:
        self.policy = policy or RouterPolicy()
        self.is_stopping = False  # told to every gateway
        self._verifiers: dict[str, _Verifier] = {}
        self._drafters: dict[str, DrafterState] = {}
        self._decisions: collections.Counter[tuple[str, str]] = collections.Counter()
        self._placements: collections.Counter[PlacementReason] = collections.Counter()
        self._started_s: float | None = None  # when the first report came
        self._heard_ids: set[str] = set()  # replicas that reported or left since then, while that matters

    def report_verifier(self, report: VerifierReport, now_s: float) -> Directive:
        """Take in a verifier's report and answer with what changes; raise `StaleEpochError` for an old incarnation."""
        self._begin(now_s)
        known = self._verifiers.get(report.verifier_id)
        if known is not None:
            _refuse_stale(report.verifier_id, report.epoch, known.state.report.epoch)
        is_new = known is None or report.epoch > known.state.report.epoch
        memory = VerifierMemory() if known is None or is_new else known.memory
        before = memory.plans
        drafters = [*self._drafters.values(), *self._unheard(report, now_s)]
        decision = plan_speculation(report, drafters, memory, self.policy, now_s)
        load = replace(report.load, requests=())  # what nobody routes by stays out of snapshots
        state = VerifierState(
            report=replace(report, load=load, step_times=()),
            reported_s=now_s,
            default_plan=decision.default_plan,
            price=report.load.price if decision.price is None else decision.price,
        )
        self._verifiers[report.verifier_id] = _Verifier(state, decision.memory)
        changed = _changed_plans(report, decision.plans, before)
        self._decisions.update(_changed_decisions(report, decision.plans, before))
        return Directive(plans=changed, default_plan=decision.default_plan, drafters=self._endpoints())

    def report_drafter(self, report: DrafterReport, now_s: float) -> None:
        """Take in a drafter's report; raise `StaleEpochError` for an old incarnation."""
        self._begin(now_s)
        known = self._drafters.get(report.drafter_id)
        if known is not None:
            _refuse_stale(report.drafter_id, report.epoch, known.report.epoch)
        self._drafters[report.drafter_id] = DrafterState(report=report, reported_s=now_s)
        self._heard_ids.add(report.drafter_id)

    def route(self, ask: RouteAsk, now_s: float) -> Assignment:
        """Choose for a new request and count it as load until the replicas' next reports."""
        assignment = route(self._live(now_s), ask, now_s, self.policy)
        verifier = self._verifiers[assignment.verifier_id]
        verifier.state = replace(verifier.state, num_assigned=verifier.state.num_assigned + 1)
        drafter = self._drafters.get(assignment.plan.drafter_id or "")
        if drafter is not None:
            self._drafters[drafter.report.drafter_id] = replace(drafter, num_assigned=drafter.num_assigned + 1)
        self._decisions[_decision(assignment.plan)] += 1
        self._placements[assignment.reason] += 1
        return assignment

    def snapshot(self, now_s: float) -> FleetSnapshot:
        """Return the live replicas, for gateways to route by while the router is away."""
        return replace(
            self._live(now_s),
            decisions=tuple(
                DecisionCount(decision=decision, reason=reason, count=count)
                for (decision, reason), count in sorted(self._decisions.items())
            ),
            placements=tuple(
                PlacementCount(reason=reason, count=count) for reason, count in sorted(self._placements.items())
            ),
            is_stopping=self.is_stopping,
        )

    def _live(self, now_s: float) -> FleetSnapshot:
        """Return the live replicas without what has been decided: all that a route depends on."""
        self._expire(now_s)
        return FleetSnapshot(
            verifiers=tuple([verifier.state for verifier in self._verifiers.values()]),
            drafters=tuple(self._drafters.values()),
            decided_at_s=now_s,
        )

    def remove(self, replica_id: str) -> None:
        """Forget a verifier or drafter that is known to be gone; unknown ids are fine (it may have expired)."""
        self._verifiers.pop(replica_id, None)
        self._drafters.pop(replica_id, None)
        self._heard_ids.add(replica_id)

    def _begin(self, now_s: float) -> None:
        self._started_s = now_s if self._started_s is None else self._started_s
        self._expire(now_s)

    def is_new(self, now_s: float) -> bool:
        """Return whether a replica may be up that has not had the time to report here."""
        return self._started_s is None or now_s - self._started_s <= self.policy.expire_after_s

    def _unheard(self, report: VerifierReport, now_s: float) -> list[DrafterState]:
        """Return the drafters that only a verifier's links tell of, as far as one can know them."""
        if not self.is_new(now_s):
            self._heard_ids.clear()
            return []
        return [
            _as_linked(drafter_id, self.policy.max_draft_length, now_s)
            for drafter_id in report.drafters_up
            if drafter_id not in self._heard_ids
        ]

    def _expire(self, now_s: float) -> None:
        policy = self.policy
        silent = [id_ for id_, known in self._verifiers.items() if not is_fresh(known.state.reported_s, now_s, policy)]
        for replica_id in silent:
            del self._verifiers[replica_id]
        silent = [id_ for id_, drafter in self._drafters.items() if not is_fresh(drafter.reported_s, now_s, policy)]
        for replica_id in silent:
            del self._drafters[replica_id]

    def _endpoints(self) -> tuple[DrafterEndpoint, ...]:
        """Return every live drafter: one that drains keeps its links until its last session is gone."""
        reports = [self._drafters[drafter_id].report for drafter_id in sorted(self._drafters)]
        return tuple([_endpoint(report.drafter_id, report.endpoint, report.epoch) for report in reports])


@functools.lru_cache(maxsize=1 << 12)  # the same few go to every verifier with every report
def _endpoint(drafter_id: str, endpoint: str, epoch: int) -> DrafterEndpoint:
    return DrafterEndpoint(drafter_id=drafter_id, endpoint=endpoint, epoch=epoch)


def _refuse_stale(replica_id: str, epoch: int, known_epoch: int) -> None:
    if epoch < known_epoch:
        raise StaleEpochError(f"{replica_id!r} reports as epoch {epoch}, but epoch {known_epoch} is running")


def _as_linked(drafter_id: str, max_draft_length: int, now_s: float) -> DrafterState:
    """Return a drafter of which nothing is known but that it is up."""
    report = DrafterReport(
        drafter_id=drafter_id,
        endpoint="",
        epoch=0,
        max_draft_length=max_draft_length,
    )
    return DrafterState(report=report, reported_s=now_s)


def _changed_plans(
    report: VerifierReport, plans: Mapping[str, SpeculationPlan], before: Mapping[str, SpeculationPlan]
) -> dict[str, SpeculationPlan]:
    """Return the plans that differ from what was last said, or from what the verifier says it follows."""
    changed: dict[str, SpeculationPlan] = {}
    for request in report.load.requests:
        plan = plans[request.request_id]
        follows = (request.drafter_id, request.draft_length) == (plan.drafter_id, plan.draft_length)
        previous = before.get(request.request_id)
        if not follows or previous is None or _followed(plan) != _followed(previous):
            changed[request.request_id] = plan
    return changed


def _followed(plan: SpeculationPlan) -> tuple[str | None, int, str | None, bool]:
    """Return what a verifier makes something of: all of a plan but why it drafts."""
    return plan.drafter_id, plan.draft_length, plan.disabled_reason, plan.is_pinned


def _decision(plan: SpeculationPlan) -> tuple[str, str]:
    reason = plan.enabled_reason if plan.draft_length > 0 else plan.disabled_reason
    return "on" if plan.draft_length > 0 else "off", reason or "none"


def _changed_decisions(
    report: VerifierReport, plans: Mapping[str, SpeculationPlan], before: Mapping[str, SpeculationPlan]
) -> list[tuple[str, str]]:
    """Return the decisions about running requests that differ from the one before; another length is none.

    Of a request that is new here only the plan that it follows is known: it came with `route`, which counted it.
    """
    decisions = []
    for request in report.load.requests:
        plan = plans[request.request_id]
        previous = before.get(request.request_id)
        was_on = request.draft_length > 0
        is_same = was_on == (plan.draft_length > 0) if previous is None else _decision(previous) == _decision(plan)
        if not is_same:
            decisions.append(_decision(plan))
    return decisions
