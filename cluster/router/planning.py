"""Which requests of a verifier may draft, and with which drafter: a pure function of its report.

How much a request drafts its verifier decides, step by step: a plan's length is a bound. The router says who may draft
at all, by one rule over what verifiers say of themselves, per verifier and report:
1. What the operator pins holds: off, always the same length, or vLLM's table of lengths by batch size.
2. A request that opted out, or that no drafter serves, runs without drafts.
3. Any other may draft while its verifier's price is below `NEVER`: the price is what a draft token takes from the
   batch, in committed tokens, and at `NEVER` nothing that is drafted pays.
4. Near the end of the KV pool drafts bring preemptions: from `kv_pressure_from` on the price is at least the pressure,
   which is 1 where the pool is full. To a request that matters less than others (by its `priority`, or since it takes
   less than half of its target inter-token time) the price counts double. So such requests lose their drafts first. To
   one that matters more it counts half: a full pool leaves it its drafts.
5. A wish must stay for a dwell. One that is off gives its drafter's session back, and its verifier goes on pricing
   what it would draft.
A router that has just started takes requests as their verifier says they are. While nobody decodes, the price is that
of a load that is gone: nothing changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from outrider.cluster.router.fleet import (
    DrafterState,
    PolicyMode,
    RequestLoad,
    RouterPolicy,
    VerifierReport,
    off,
    table_length,
)
from outrider.cluster.router.routing import DrafterDesk
from outrider.cluster.router.switches import Switch
from outrider.verifier_service.messages.engine import NEVER
from outrider.verifier_service.messages.request import DisabledReason, EnabledReason, SpeculationPlan

LESSER, PLAIN, URGENT = WORTHS = (0.5, 1.0, 2.0)  # of a request's tokens
AMPLE_SHARE = 0.5  # of its target inter-token time: a request that takes less can afford to lose its drafts
FILLED = 0.5  # of the knee: from there on one percent more tokens cost a third of a percent of a step's time or more


@dataclass(frozen=True, slots=True)
class VerifierMemory:
    """What is kept of one verifier between reports."""

    switches: Mapping[float, Switch] = field(default_factory=dict)  # by what requests' tokens are worth; empty: new
    plans: Mapping[str, SpeculationPlan] = field(default_factory=dict)  # by request, as last decided


@dataclass(frozen=True, slots=True)
class Decision:
    """The plans of every request in the report, that of newcomers, and what to remember."""

    plans: dict[str, SpeculationPlan]
    default_plan: SpeculationPlan
    memory: VerifierMemory
    price: float | None  # by which was decided; None: by none


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
    desk = DrafterDesk(drafters, report, policy)
    pinned = _pinned_length(report, policy)
    blanket = _blanket_reason(report, pinned, policy)
    rule: _Rule | None = None
    if blanket is None and pinned is None:
        rule = _Rule.after(report, memory, policy, now_s)
        memory = replace(memory, switches=rule.switches)

    def plan_of(drafter: DrafterState | None, cap: int | None, worth: float) -> SpeculationPlan:
        if cap == 0:
            return off(DisabledReason.REQUEST_OPT_OUT)
        if drafter is None:
            return off(desk.reason)
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
    for request in report.running:
        cap = request.num_speculative_tokens
        drafter = None if cap == 0 else desk.choose(request.drafter_id)
        plans[request.request_id] = plan_of(drafter, cap, worth_of(request))
    default_plan = plan_of(desk.choose(None), None, PLAIN)
    for request in report.waiting:
        plans[request.request_id] = _capped(default_plan, request)
    return Decision(plans, default_plan, replace(memory, plans=plans), None if rule is None else rule.price)


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule at one price."""

    price: float | None  # None: nobody decodes
    is_filled: bool  # verifying costs what drafts do not bring; below that it is the wait for them
    switches: Mapping[float, Switch]

    @classmethod
    def after(cls, report: VerifierReport, memory: VerifierMemory, policy: RouterPolicy, now_s: float) -> _Rule:
        """Return the rule after a report, whose price moves the switches."""
        load = report.load
        pressure = (load.kv_usage - policy.kv_pressure_from) / (1.0 - policy.kv_pressure_from or 1.0)
        is_filled = pressure > 0.0 or (load.knee is not None and load.num_decoding >= FILLED * load.knee)
        price = None if load.num_decoding == 0 or load.price is None else max(load.price, pressure)
        switches = memory.switches or _as_reported(report)
        if price is not None:
            may_pay = load.price is not None and load.price < NEVER
            dwells = {"on_dwell_s": policy.on_dwell_s, "off_dwell_s": policy.off_dwell_s}
            switches = {
                worth: switch.toward(may_pay and price / worth < NEVER, now_s, **dwells)
                for worth, switch in switches.items()
            }
        return cls(price, is_filled, switches)

    def plan(self, drafter_id: str, longest: int, worth: float) -> SpeculationPlan:
        """Return the plan of a request whose tokens are worth so much."""
        switch = self.switches[worth]
        if not switch.is_on:
            return off(DisabledReason.LOAD if self.is_filled or worth < PLAIN else DisabledReason.DRAFT_QUEUE)
        reason = EnabledReason.PAYS if switch.pending_since_s is None else EnabledReason.DWELL
        return SpeculationPlan(drafter_id=drafter_id, draft_length=longest, enabled_reason=reason)


def _as_reported(report: VerifierReport) -> dict[float, Switch]:
    """Return the switches of a verifier that is new here: on, unless its requests run without drafts."""
    running = [request for request in report.running if request.num_speculative_tokens != 0]
    is_on = not running or any(request.draft_length > 0 for request in running)
    return dict.fromkeys(WORTHS, Switch(is_on))


def worth_of(request: RequestLoad) -> float:
    """Return what a request's tokens count for beside others'.

    Of its two hints, priority and target, the one that makes it matter more holds.
    """
    target_ms, taken_ms = request.target_inter_token_ms, request.inter_token_ms
    share = 1.0 if target_ms is None or taken_ms is None else taken_ms / target_ms
    if request.priority < 0 or share > 1.0:
        return URGENT
    if request.priority > 0 or share < AMPLE_SHARE:
        return LESSER
    return PLAIN


def _pinned_length(report: VerifierReport, policy: RouterPolicy) -> int | None:
    """Return the length that the operator has pinned for this verifier, or None where it is for us to find."""
    if policy.mode is PolicyMode.ALWAYS:
        return policy.max_draft_length
    if policy.draft_length_by_batch_size:
        return table_length(policy.draft_length_by_batch_size, report.load.num_running)
    return None


def _blanket_reason(report: VerifierReport, pinned: int | None, policy: RouterPolicy) -> DisabledReason | None:
    if policy.mode is PolicyMode.OFF or policy.max_draft_length == 0:
        return DisabledReason.CONFIG
    if pinned is not None:
        return DisabledReason.LOAD if pinned == 0 else None  # the table's: at this batch size no draft pays
    return DisabledReason.WARMUP if report.load.price is None else None


def _capped(plan: SpeculationPlan, request: RequestLoad) -> SpeculationPlan:
    """Return the newcomers' plan for a request that waits."""
    cap = request.num_speculative_tokens
    if cap == 0:
        return off(DisabledReason.REQUEST_OPT_OUT)
    return plan if cap is None or cap >= plan.draft_length else replace(plan, draft_length=cap)
