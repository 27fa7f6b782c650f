"""Which requests of a verifier may draft, and with which drafter: pure functions of its report.

A plan's length is a bound: the verifier decides step by step how much a request drafts. The router decides who may
draft at all, by one rule per verifier and report:
1. A request that opted out, whose operator switched drafts off, or that no drafter serves, runs without drafts.
2. What the operator pins holds: always one length, or vLLM's table of lengths by batch size.
3. Any other request may draft while its verifier's price is below `NEVER`. The price is what a draft token takes from
   the batch, in committed tokens; at `NEVER` no draft pays.
4. Near the end of the KV pool drafts bring preemptions: from `kv_pressure_from` on the price is at least the pressure,
   which is 1 where the pool is full. The price counts double for a request of low worth (a low `priority`, or an
   inter-token time below half of its target), and half for an urgent one. So requests of low worth lose their drafts
   first, and an urgent one keeps its drafts where the pool is full.
5. A switch flips once the other state has been wanted for a dwell. A request that is off gives its drafter's session
   back, and its verifier goes on pricing what it would draft.
A router that has just started takes requests as their verifier reports them. While no request decodes, the price is
that of an earlier load, and no switch moves.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.cluster.router.drafter_assignment import DrafterAssigner
from outrider.cluster.router.fleet import (
    BatchSizeTable,
    DrafterState,
    PolicyMode,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
    VerifierState,
)
from outrider.verifier_service.messages.engine import NEVER, RequestLoad
from outrider.verifier_service.messages.request import DisabledReason, EnabledReason, SpeculationPlan

LOW, NORMAL, URGENT = WORTHS = (0.5, 1.0, 2.0)  # of a request's tokens
AMPLE_SHARE = 0.5  # of its target inter-token time: a request that takes less can afford to lose its drafts
FILLED = 0.5  # of the knee: from there on one percent more tokens cost a third of a percent of a step's time or more


@dataclass(frozen=True, slots=True)
class Switch:
    """On or off, with hysteresis in time."""

    is_on: bool
    pending_since_s: float | None = None  # since when the other state has been wanted

    def toward(self, is_wanted: bool, now_s: float, *, on_dwell_s: float, off_dwell_s: float) -> Switch:
        """Return the switch after a wish: it flips once the wish has lasted for the dwell."""
        if is_wanted == self.is_on:
            return self if self.pending_since_s is None else Switch(self.is_on)
        since_s = now_s if self.pending_since_s is None else self.pending_since_s
        dwell_s = off_dwell_s if self.is_on else on_dwell_s
        return Switch(not self.is_on) if now_s - since_s >= dwell_s else Switch(self.is_on, since_s)


@dataclass(frozen=True, slots=True)
class VerifierMemory:
    """What is kept of one verifier between reports; empty: it is new."""

    switches: Mapping[float, Switch] = field(default_factory=dict)  # by the worth of requests
    plans: Mapping[str, SpeculationPlan] = field(default_factory=dict)  # by request, as last decided


@dataclass(frozen=True, slots=True)
class Decision:
    """What changes by a report, and what to remember of it."""

    changed_plans: dict[str, SpeculationPlan]  # by request
    switched: list[tuple[str, str]]  # `decision_of` each running request for which it is a new one
    default_plan: SpeculationPlan  # of requests that have not been reported yet
    memory: VerifierMemory
    price: float | None  # that the rule went by, else the verifier's own


def plan_speculation(
    report: VerifierReport,
    drafters: Sequence[DrafterState],
    memory: VerifierMemory,
    policy: RouterPolicy,
    now_s: float,
) -> Decision:
    """Decide every request's plan by the module's rule; `drafters` are the live ones.

    While the verifier has no price yet, speculation is off (`warmup`), unless it is pinned.
    """
    requests = report.load.requests
    running = [request for request in requests if request.is_running]
    willing = [request for request in running if request.num_speculative_tokens != 0]
    assigner = DrafterAssigner(drafters, report, policy)
    assigned = {request.request_id: assigner.assign(request.drafter_id) for request in willing}
    next_drafter = assigner.assign(None)
    pinned = _pinned_length(report, policy)
    blanket = _blanket_reason(report, pinned, policy)
    rule = _Rule.after(report, willing, memory, policy, now_s) if blanket is None and pinned is None else None

    def plan_of(drafter: DrafterState | None, cap: int | None, worth: float) -> SpeculationPlan:
        if cap == 0:
            return off(DisabledReason.REQUEST_OPT_OUT)
        if blanket is DisabledReason.CONFIG:  # with drafters or without: the operator looks at his own switch first
            return off(blanket)
        if drafter is None:
            return off(assigner.reason)
        if blanket is not None:
            return off(blanket)
        longest = min(policy.max_draft_length, drafter.report.max_draft_length)
        longest = longest if cap is None else min(longest, cap)
        if rule is not None:
            return rule.plan(drafter.report.drafter_id, longest, worth)
        return SpeculationPlan(
            drafter_id=drafter.report.drafter_id,
            draft_length=min(longest, pinned or 0),
            enabled_reason=EnabledReason.PINNED,
            is_pinned=True,
        )

    plans: dict[str, SpeculationPlan] = {}
    for request in running:
        drafter = assigned.get(request.request_id)
        plans[request.request_id] = plan_of(drafter, request.num_speculative_tokens, _worth_of(request))
    default_plan = plan_of(next_drafter, None, NORMAL)
    for request in requests:
        if not request.is_running:
            plans[request.request_id] = _capped(default_plan, request.num_speculative_tokens)
    return Decision(
        changed_plans=_changed_plans(requests, plans, memory.plans),
        switched=_switched(requests, plans, memory.plans),
        default_plan=default_plan,
        memory=VerifierMemory(memory.switches if rule is None else rule.switches, plans),
        price=report.load.price if rule is None or rule.price is None else rule.price,
    )


def plan_arrival(
    verifier: VerifierState, drafters: Sequence[DrafterState], ask: RouteAsk, policy: RouterPolicy
) -> SpeculationPlan:
    """Return the plan of a new request: its verifier's default, with the drafter that is best now."""
    cap, default = ask.num_speculative_tokens, verifier.default_plan
    if cap == 0:
        return off(DisabledReason.REQUEST_OPT_OUT)
    if default.draft_length == 0:
        return default
    assigner = DrafterAssigner(drafters, verifier.report, policy)
    drafter = assigner.assign(None)
    if drafter is None:
        return off(assigner.reason)
    length = min(default.draft_length, drafter.report.max_draft_length)
    return _capped(replace(default, drafter_id=drafter.report.drafter_id, draft_length=length), cap)


@functools.cache  # plans are frozen, and a busy router needs this one often
def off(reason: DisabledReason) -> SpeculationPlan:
    """Return the plan of a request that runs without drafts."""
    return SpeculationPlan(disabled_reason=reason)


def decision_of(plan: SpeculationPlan) -> tuple[str, str]:
    """Return "on" or "off" and the reason, as operators count them; a draft length is no part of it."""
    reason = plan.enabled_reason if plan.draft_length > 0 else plan.disabled_reason
    return "on" if plan.draft_length > 0 else "off", reason or "none"


def table_length(table: BatchSizeTable, batch_size: int) -> int:
    """Return a table's draft length for a batch; as in vLLM, a range also covers the gap or the end behind it."""
    index = bisect_right(table, batch_size, key=lambda row: row[0])
    return table[max(0, index - 1)][2]


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule at one price."""

    price: float | None  # None: no request decodes
    is_filled: bool  # the reason for no drafts is the cost of verifying them; below the knee, the wait for them
    switches: Mapping[float, Switch]

    @classmethod
    def after(
        cls,
        report: VerifierReport,
        willing: Sequence[RequestLoad],
        memory: VerifierMemory,
        policy: RouterPolicy,
        now_s: float,
    ) -> _Rule:
        """Return the rule after a report, whose price moves the switches."""
        load = report.load
        pressure = (load.kv_usage - policy.kv_pressure_from) / (1.0 - policy.kv_pressure_from or 1.0)
        is_filled = pressure > 0.0 or (load.knee is not None and load.num_decoding >= FILLED * load.knee)
        price = None if load.num_decoding == 0 or load.price is None else max(load.price, pressure)
        switches = memory.switches or _as_reported(willing)
        if price is not None:
            may_pay = load.price is not None and load.price < NEVER
            dwells = {"on_dwell_s": policy.on_dwell_s, "off_dwell_s": policy.off_dwell_s}
            switches = {
                worth: switch.toward(may_pay and price / worth < NEVER, now_s, **dwells)
                for worth, switch in switches.items()
            }
        return cls(price, is_filled, switches)

    def plan(self, drafter_id: str, longest: int, worth: float) -> SpeculationPlan:
        """Return the plan of a request of a worth."""
        switch = self.switches[worth]
        if not switch.is_on:
            return off(DisabledReason.LOAD if self.is_filled or worth < NORMAL else DisabledReason.DRAFT_QUEUE)
        reason = EnabledReason.PAYS if switch.pending_since_s is None else EnabledReason.DWELL
        return SpeculationPlan(drafter_id=drafter_id, draft_length=longest, enabled_reason=reason)


def _as_reported(willing: Sequence[RequestLoad]) -> dict[float, Switch]:
    """Return the switches of a new verifier: on, unless all of its running requests run without drafts."""
    is_on = not willing or any(request.draft_length > 0 for request in willing)
    return dict.fromkeys(WORTHS, Switch(is_on))


def _worth_of(request: RequestLoad) -> float:
    """Return what a request's tokens are worth, by priority and target: the hint that gives it more holds."""
    target_ms, taken_ms = request.target_inter_token_ms, request.inter_token_ms
    share = 1.0 if target_ms is None or taken_ms is None else taken_ms / target_ms
    if request.priority < 0 or share > 1.0:
        return URGENT
    if request.priority > 0 or share < AMPLE_SHARE:
        return LOW
    return NORMAL


def _pinned_length(report: VerifierReport, policy: RouterPolicy) -> int | None:
    """Return the length that the operator pins for this verifier; None: the price decides."""
    if policy.mode is PolicyMode.ALWAYS:
        return policy.max_draft_length
    if policy.draft_length_by_batch_size:
        return table_length(policy.draft_length_by_batch_size, report.load.num_running)
    return None


def _blanket_reason(report: VerifierReport, pinned: int | None, policy: RouterPolicy) -> DisabledReason | None:
    """Return the reason for which no request of this verifier drafts, if there is one."""
    if policy.mode is PolicyMode.OFF or policy.max_draft_length == 0:
        return DisabledReason.CONFIG
    if pinned is not None:
        return DisabledReason.LOAD if pinned == 0 else None  # the table's length at this batch size
    return DisabledReason.WARMUP if report.load.price is None else None


def _capped(plan: SpeculationPlan, cap: int | None) -> SpeculationPlan:
    """Return the default plan within a request's own cap."""
    if cap == 0:
        return off(DisabledReason.REQUEST_OPT_OUT)
    return plan if cap is None or cap >= plan.draft_length else replace(plan, draft_length=cap)


def _changed_plans(
    requests: Sequence[RequestLoad], plans: Mapping[str, SpeculationPlan], before: Mapping[str, SpeculationPlan]
) -> dict[str, SpeculationPlan]:
    """Return the plans that differ from the ones before, or from what the verifier reports that it follows."""
    changed: dict[str, SpeculationPlan] = {}
    for request in requests:
        plan, previous = plans[request.request_id], before.get(request.request_id)
        is_followed = (request.drafter_id, request.draft_length) == (plan.drafter_id, plan.draft_length)
        if not is_followed or previous is None or _effect(plan) != _effect(previous):
            changed[request.request_id] = plan
    return changed


def _effect(plan: SpeculationPlan) -> tuple[str | None, int, str | None, bool]:
    """Return what a verifier acts on: all of a plan but its `enabled_reason`."""
    return plan.drafter_id, plan.draft_length, plan.disabled_reason, plan.is_pinned


def _switched(
    requests: Sequence[RequestLoad], plans: Mapping[str, SpeculationPlan], before: Mapping[str, SpeculationPlan]
) -> list[tuple[str, str]]:
    """Return the decisions that differ from the ones before.

    A request that is new here follows the plan of `route`, which counted that decision: only on or off is compared.
    """
    decisions: list[tuple[str, str]] = []
    for request in requests:
        plan, previous = plans[request.request_id], before.get(request.request_id)
        was_on = request.draft_length > 0
        is_same = was_on == (plan.draft_length > 0) if previous is None else decision_of(previous) == decision_of(plan)
        if not is_same:
            decisions.append(decision_of(plan))
    return decisions
