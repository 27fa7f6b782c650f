"""Which requests of a verifier speculate, on which drafter and how far: a pure function of its report.

The rule, per verifier and per report:
1. Estimate each request's acceptance from its own past drafts, starting from what the pool achieves.
2. Take draft positions in order of their survival (the chance that it and all before it are accepted) for as long as
   the expected tokens per second of the whole batch grow, by the verifier's measured step times. When the machine is
   compute-bound, the requests with the lowest acceptance so lose their drafts first.
3. Speculation of the whole verifier is switched off (`load`, or `draft_queue` when only the wait for drafts makes it
   slow) when even the best position has not paid for a dwell, and on again when the gain has exceeded 10 % for a
   dwell. Each request has such a switch too, moved by whether it won positions. One that is off competes with its
   survivals divided by 1.10, so equals do not take turns.
4. A request that is off for its own acceptance would never show a better one, so it drafts for a moment every few
   seconds. Likewise a verifier that is off because drafts came too late.
Only figures of earlier rounds enter, so no choice depends on the tokens of the draft that it concerns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.cluster.fleet import (
    DisabledReason,
    DrafterState,
    PolicyMode,
    RequestLoad,
    RouterPolicy,
    VerifierReport,
    off,
)
from outrider.cluster.goodput import (
    Allocation,
    Candidate,
    SpeculationSwitch,
    VerifierMemory,
    allocate,
    observe,
    solo_gain,
)
from outrider.cluster.routing import DrafterDesk
from outrider.verifier_service.cost_model import StepTimeModel
from outrider.verifier_service.request import SpeculationPlan


@dataclass(frozen=True, slots=True)
class Decision:
    """The plans of every request in the report, that of newcomers, and what to remember."""

    plans: dict[str, SpeculationPlan]
    default_plan: SpeculationPlan
    memory: VerifierMemory
    price: float | None  # committed tokens that one more draft position costs; None: nothing was computed


@dataclass(frozen=True, slots=True)
class _Entrant:
    """A request that could speculate, with a drafter for it."""

    request_id: str
    drafter_id: str
    acceptance_rate: float
    max_length: int

    def plan(self, length: int) -> SpeculationPlan:
        return SpeculationPlan(drafter_id=self.drafter_id, draft_length=length)


@dataclass(frozen=True, slots=True)
class _Verdict:
    memory: VerifierMemory
    plans: dict[str, SpeculationPlan]  # of the requests that could speculate
    default_plan: SpeculationPlan
    price: float | None = None


def plan_speculation(
    report: VerifierReport,
    drafters: Sequence[DrafterState],
    memory: VerifierMemory,
    policy: RouterPolicy,
    now_s: float,
    step_time: StepTimeModel | None,
) -> Decision:
    """Decide every request's draft length by the module's rule; `drafters` are the live ones, `step_time` the profile.

    Without a profile speculation is off (`warmup`), unless the operator pins it on.
    """
    memory = observe(report, memory, policy, now_s)
    desk = DrafterDesk(drafters, report, policy)
    plans, entrants = _enter(report, memory, desk, policy)
    newcomer = _enter_newcomer(report, memory, desk, policy)
    if (reason := _blanket_reason(step_time, policy)) is not None:
        verdict = _Verdict(memory, {entrant.request_id: off(reason) for entrant in entrants}, off(reason))
    elif policy.mode is PolicyMode.ALWAYS or step_time is None:
        pinned = {entrant.request_id: entrant.plan(entrant.max_length) for entrant in entrants}
        verdict = _Verdict(memory, pinned, off(desk.reason) if newcomer is None else newcomer.plan(newcomer.max_length))
    else:
        judge = _Judge(report, policy, now_s, step_time, _exposed_s(report, desk, policy))
        verdict = judge.decide(memory, entrants, newcomer, desk.reason)
    plans |= verdict.plans
    for request in report.requests[report.num_running :]:
        plans[request.request_id] = _capped(verdict.default_plan, request)
    requests = {
        request_id: replace(kept, plan=plans[request_id]) for request_id, kept in verdict.memory.requests.items()
    }
    memory = replace(verdict.memory, requests=requests, default_plan=verdict.default_plan)
    return Decision(plans, verdict.default_plan, memory, verdict.price)


def _enter(
    report: VerifierReport, memory: VerifierMemory, desk: DrafterDesk, policy: RouterPolicy
) -> tuple[dict[str, SpeculationPlan], list[_Entrant]]:
    """Sort the running requests into those that cannot speculate, with their plans, and those that can."""
    plans: dict[str, SpeculationPlan] = {}
    entrants: list[_Entrant] = []
    prior_rate, prior_tokens = memory.pool_rate(policy.acceptance), policy.acceptance.request_prior_tokens
    for request in report.requests[: report.num_running]:
        if request.num_speculative_tokens == 0:
            plans[request.request_id] = off(DisabledReason.REQUEST_OPT_OUT)
        elif (drafter := desk.choose(request.request_id, request.drafter_id)) is None:
            plans[request.request_id] = off(desk.reason)
        else:
            cap = policy.max_draft_length if request.num_speculative_tokens is None else request.num_speculative_tokens
            entrants.append(
                _Entrant(
                    request.request_id,
                    drafter.report.drafter_id,
                    memory.requests[request.request_id].counts.rate(prior_rate=prior_rate, prior_tokens=prior_tokens),
                    min(cap, policy.max_draft_length, drafter.report.max_draft_length),
                )
            )
    return plans, entrants


def _enter_newcomer(
    report: VerifierReport, memory: VerifierMemory, desk: DrafterDesk, policy: RouterPolicy
) -> _Entrant | None:
    """Return the request that may arrive next, of the pool's acceptance; None when no drafter takes it."""
    drafter = desk.choose(report.verifier_id, None)
    if drafter is None:
        return None
    max_length = min(policy.max_draft_length, drafter.report.max_draft_length)
    return _Entrant("", drafter.report.drafter_id, memory.pool_rate(policy.acceptance), max_length)


def _blanket_reason(step_time: StepTimeModel | None, policy: RouterPolicy) -> DisabledReason | None:
    if policy.mode is PolicyMode.OFF or policy.max_draft_length == 0:
        return DisabledReason.CONFIG
    return DisabledReason.WARMUP if step_time is None and policy.mode is PolicyMode.AUTO else None


def _capped(plan: SpeculationPlan, request: RequestLoad) -> SpeculationPlan:
    """Return the newcomers' plan for a request that waits."""
    cap = request.num_speculative_tokens
    if cap == 0:
        return off(DisabledReason.REQUEST_OPT_OUT)
    return plan if cap is None or cap >= plan.draft_length else replace(plan, draft_length=cap)


def _exposed_s(report: VerifierReport, desk: DrafterDesk, policy: RouterPolicy) -> float:
    """Return how long a batch waits for its drafts: the mean round trip, at first the drafters' own time."""
    measured = [trip.seconds for trip in report.round_trips if trip.drafter_id in desk.linked]
    times_s = measured or [state.report.mean_draft_s for state in desk.linked.values()]
    return policy.exposed_draft_share * sum(times_s) / len(times_s) if times_s else 0.0


@dataclass(frozen=True, slots=True)
class _Judge:
    """One decision about one verifier, in mode auto."""

    report: VerifierReport
    policy: RouterPolicy
    now_s: float
    step_time: StepTimeModel
    exposed_s: float

    def decide(
        self,
        memory: VerifierMemory,
        entrants: Sequence[_Entrant],
        newcomer: _Entrant | None,
        no_drafter: DisabledReason,
    ) -> _Verdict:
        """Move the verifier's switch, then, if it is on, the requests' own."""
        contenders = [entrant for entrant in entrants if not self._is_hopeless(memory, entrant)]
        judged = contenders or ([newcomer] if newcomer else [])
        if not judged:  # nobody to judge by: all that is left is hopeless or has no drafter
            switch = memory.switch or SpeculationSwitch(True, self.now_s)
            return self._by_request(replace(memory, switch=switch), entrants, self._allocate([]), off(no_drafter))
        whole = self._allocate(judged)
        switch = self._verifier_switch(memory.switch, whole.gain)
        if not switch.is_on:
            return replace(self._all_off(replace(memory, switch=switch), entrants, judged), price=whole.price)
        if memory.switch is not None and not memory.switch.is_on:
            memory = _all_switched_on(memory, contenders, self.now_s)
        handicapped = [self._handicapped(memory, entrant) for entrant in contenders]
        allocation = whole if handicapped == judged else self._allocate(handicapped)
        default = off(no_drafter) if newcomer is None else self._default_plan(newcomer, allocation.price)
        return self._by_request(replace(memory, switch=switch), entrants, allocation, default)

    def _allocate(self, entrants: Sequence[_Entrant], *, exposed_s: float | None = None) -> Allocation:
        return allocate(
            [Candidate(entrant.request_id, entrant.acceptance_rate, entrant.max_length) for entrant in entrants],
            num_decoding=max(1, self.report.num_decoding, len(entrants)),
            step_time=self.step_time,
            min_price=self.policy.min_price,
            exposed_s=self.exposed_s if exposed_s is None else exposed_s,
        )

    def _verifier_switch(self, switch: SpeculationSwitch | None, gain: float) -> SpeculationSwitch:
        if switch is None:
            return SpeculationSwitch(gain > self.policy.switch.on_gain, self.now_s)
        return switch.after(gain, self.now_s, self.policy.switch)

    def _all_off(self, memory: VerifierMemory, entrants: Sequence[_Entrant], judged: Sequence[_Entrant]) -> _Verdict:
        """Switch every request off, except in the moments when drafts that came too late are tried again."""
        assert memory.switch is not None
        without_wait = self._allocate(judged, exposed_s=0.0)
        reason = DisabledReason.LOAD
        if without_wait.gain > self.policy.switch.on_gain:
            reason = DisabledReason.DRAFT_QUEUE
        elif without_wait.gain == 0.0:  # no position worth even the least price
            reason = DisabledReason.LOW_ACCEPTANCE
        if reason is not DisabledReason.LOAD and self._is_probing(memory.switch):
            return _Verdict(memory, {entrant.request_id: self._probe(entrant) for entrant in entrants}, off(reason))
        return _Verdict(memory, {entrant.request_id: off(reason) for entrant in entrants}, off(reason))

    def _by_request(
        self, memory: VerifierMemory, entrants: Sequence[_Entrant], allocation: Allocation, default: SpeculationPlan
    ) -> _Verdict:
        """Move every request's switch; one that is on keeps at least one position until its dwell is over."""
        plans, requests = {}, dict(memory.requests)
        for entrant in entrants:
            kept = requests[entrant.request_id]
            length = allocation.lengths.get(entrant.request_id, 0)
            switch = kept.switch.toward(length > 0, self.now_s, self.policy.switch)
            requests[entrant.request_id] = replace(kept, switch=switch)
            plan = entrant.plan(max(1, length)) if switch.is_on else self._off_plan(entrant, switch)
            plans[entrant.request_id] = plan
        return _Verdict(replace(memory, requests=requests), plans, default, allocation.price)

    def _handicapped(self, memory: VerifierMemory, entrant: _Entrant) -> _Entrant:
        """Return the entrant as it competes: one that is off must be better by the margin, not as good."""
        if memory.requests[entrant.request_id].switch.is_on:
            return entrant
        return replace(entrant, acceptance_rate=entrant.acceptance_rate / self.policy.switch.on_gain)

    def _off_plan(self, entrant: _Entrant, switch: SpeculationSwitch) -> SpeculationPlan:
        if not self._is_low(entrant):
            return off(DisabledReason.LOAD)
        return self._probe(entrant) if self._is_probing(switch) else off(DisabledReason.LOW_ACCEPTANCE)

    def _default_plan(self, newcomer: _Entrant, price: float) -> SpeculationPlan:
        """Give a request that may arrive next the positions that are worth the price."""
        length, survival = 0, newcomer.acceptance_rate
        while length < newcomer.max_length and survival > price:
            length, survival = length + 1, survival * newcomer.acceptance_rate
        if length > 0:
            return newcomer.plan(length)
        return off(DisabledReason.LOW_ACCEPTANCE if self._is_low(newcomer) else DisabledReason.LOAD)

    def _is_hopeless(self, memory: VerifierMemory, entrant: _Entrant) -> bool:
        return not memory.requests[entrant.request_id].switch.is_on and self._is_low(entrant)

    def _is_low(self, entrant: _Entrant) -> bool:
        """Return whether not even an idle machine would bring the request's drafts back."""
        gain = solo_gain(entrant.acceptance_rate, entrant.max_length, self.policy.min_price)
        return gain <= self.policy.switch.on_gain

    def _is_probing(self, switch: SpeculationSwitch) -> bool:
        period_s = self.policy.probe_every_s + self.policy.probe_s
        return (self.now_s - switch.changed_s) % period_s >= self.policy.probe_every_s

    def _probe(self, entrant: _Entrant) -> SpeculationPlan:
        return entrant.plan(min(self.policy.probe_length, entrant.max_length))


def _all_switched_on(memory: VerifierMemory, entrants: Sequence[_Entrant], now_s: float) -> VerifierMemory:
    requests = dict(memory.requests)
    for entrant in entrants:
        requests[entrant.request_id] = replace(
            requests[entrant.request_id], switch=SpeculationSwitch(is_on=True, changed_s=now_s)
        )
    return replace(memory, requests=requests)
