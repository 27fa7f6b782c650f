"""Which requests of a verifier speculate, on which drafter and how far: a pure function of its report.

The rule, per verifier and per report:
1. Estimate each request's acceptance from its own past drafts, starting from what the pool achieves.
2. What the operator pins holds: off, always the same length, or vLLM's table of lengths by batch size.
3. Otherwise a draft position pays where its survival (the chance that it and all before it are accepted) exceeds the
   price of a draft token that the verifier says (`judging`). When the machine is compute-bound, the requests with the
   lowest acceptance so lose their drafts first. A token of an urgent request (by its `priority`, or since it is slower
   than its target inter-token time) counts double, one of a lesser request (by its `priority`, or since it takes less
   than half of its target) half.
4. Speculation of the whole verifier is switched off (`load`, or `draft_queue` where few requests decode, so that the
   wait for drafts makes it slow) when even the best position has not paid for a dwell, and on again when the gain has
   exceeded 10 % for a dwell. Each request has such a switch too, moved by whether positions of it pay. One that is off
   competes with its survivals divided by 1.10, so equals do not take turns. Off means a plan without a drafter: its
   session is released.
5. A request that is off for its own acceptance would never show a better one, so it drafts for a moment every few
   seconds. Likewise a verifier that is off because drafts came too late.
6. A router that has just started takes the requests as their verifier says they are, so nothing changes for a dwell.
Only figures of earlier rounds enter, so no choice depends on the tokens of the draft that it concerns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.cluster.router.fleet import (
    DrafterState,
    PolicyMode,
    RequestLoad,
    RouterPolicy,
    VerifierReport,
    off,
    table_length,
)
from outrider.cluster.router.goodput import VerifierMemory, observe
from outrider.cluster.router.judging import Entrant, Judge, Verdict
from outrider.cluster.router.routing import DrafterDesk
from outrider.verifier_service.messages.request import DisabledReason, EnabledReason, SpeculationPlan

URGENT_WORTH = 2.0  # of a token of an urgent request; of a lesser one's the inverse: a nudge, for prices differ by more
AMPLE_SHARE = 0.5  # of its target inter-token time: a request that takes less can afford to lose its drafts


@dataclass(frozen=True, slots=True)
class Decision:
    """The plans of every request in the report, that of newcomers, and what to remember."""

    plans: dict[str, SpeculationPlan]
    default_plan: SpeculationPlan
    memory: VerifierMemory
    price: float | None  # committed tokens that one more draft position costs; None: nothing was computed


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
    memory = observe(report, memory, policy, now_s)
    desk = DrafterDesk(drafters, report, policy)
    plans, entrants = _enter(report, memory, desk, policy)
    newcomer = _enter_newcomer(memory, desk, policy)
    pinned = _pinned_length(report, policy)
    if (reason := _blanket_reason(report, pinned, policy)) is not None:
        verdict = Verdict(memory, {entrant.request_id: off(reason) for entrant in entrants}, off(reason))
    elif pinned is not None:
        default = off(desk.reason) if newcomer is None else _pin(newcomer, pinned)
        verdict = Verdict(memory, {entrant.request_id: _pin(entrant, pinned) for entrant in entrants}, default)
    else:
        verdict = Judge(report, policy, now_s).decide(memory, entrants, newcomer, desk.reason)
    plans |= verdict.plans
    for request in report.waiting:
        plans[request.request_id] = _capped(verdict.default_plan, request)
    requests = {
        request_id: kept if kept.plan == plans[request_id] else replace(kept, plan=plans[request_id])
        for request_id, kept in verdict.memory.requests.items()
    }
    memory = replace(verdict.memory, requests=requests, default_plan=verdict.default_plan)
    return Decision(plans, verdict.default_plan, memory, verdict.price)


def _enter(
    report: VerifierReport, memory: VerifierMemory, desk: DrafterDesk, policy: RouterPolicy
) -> tuple[dict[str, SpeculationPlan], list[Entrant]]:
    """Sort the running requests into those that cannot speculate, with their plans, and those that can."""
    plans: dict[str, SpeculationPlan] = {}
    entrants: list[Entrant] = []
    prior_rate, prior_tokens = memory.pool_rate(policy.acceptance), policy.acceptance.request_prior_tokens
    for request in report.running:
        if request.num_speculative_tokens == 0:
            plans[request.request_id] = off(DisabledReason.REQUEST_OPT_OUT)
        elif (drafter := desk.choose(request.drafter_id)) is None:
            plans[request.request_id] = off(desk.reason)
        else:
            cap = policy.max_draft_length if request.num_speculative_tokens is None else request.num_speculative_tokens
            entrants.append(
                Entrant(
                    request.request_id,
                    drafter.report.drafter_id,
                    memory.requests[request.request_id].counts.rate(prior_rate=prior_rate, prior_tokens=prior_tokens),
                    min(cap, policy.max_draft_length, drafter.report.max_draft_length),
                    _worth(request),
                )
            )
    return plans, entrants


def _worth(request: RequestLoad) -> float:
    """Return what a request's tokens count for beside others': those who matter less lose their drafts first.

    Of its two hints, priority and target, the one that makes it matter more holds.
    """
    target_ms, taken_ms = request.target_inter_token_ms, request.inter_token_ms
    share = 1.0 if target_ms is None or taken_ms is None else taken_ms / target_ms
    if request.priority < 0 or share > 1.0:
        return URGENT_WORTH
    if request.priority > 0 or share < AMPLE_SHARE:
        return 1.0 / URGENT_WORTH
    return 1.0


def _enter_newcomer(memory: VerifierMemory, desk: DrafterDesk, policy: RouterPolicy) -> Entrant | None:
    """Return the request that may arrive next, of the pool's acceptance; None when no drafter takes it."""
    drafter = desk.choose(None)
    if drafter is None:
        return None
    max_length = min(policy.max_draft_length, drafter.report.max_draft_length)
    return Entrant("", drafter.report.drafter_id, memory.pool_rate(policy.acceptance), max_length)


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


def _pin(entrant: Entrant, length: int) -> SpeculationPlan:
    return entrant.plan(min(length, entrant.max_length), EnabledReason.PINNED)


def _capped(plan: SpeculationPlan, request: RequestLoad) -> SpeculationPlan:
    """Return the newcomers' plan for a request that waits."""
    cap = request.num_speculative_tokens
    if cap == 0:
        return off(DisabledReason.REQUEST_OPT_OUT)
    return plan if cap is None or cap >= plan.draft_length else replace(plan, draft_length=cap)
