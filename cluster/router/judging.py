"""One decision about one verifier in mode auto: which of its requests draft, at the price that it says.

The *price* is how many committed tokens one more draft token takes from the batch, waits for drafts included. A plan's
length is a bound, below which the verifier decides step by step; the router says who takes part at all. A verifier
prices those who may not draft as well, by what it remembers of waits and acceptance, which is tried again now and then.
Before its first drafts its price is a guess, and drafts are let through. Near the end of the KV pool the price rises to
1: draft tokens take blocks, and a preemption costs more than a draft gains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.cluster.router.fleet import RouterPolicy, VerifierReport, off
from outrider.cluster.router.goodput import SpeculationSwitch, VerifierMemory, solo_gain, worth_length
from outrider.verifier_service.messages.request import DisabledReason, EnabledReason, SpeculationPlan

FILLED = 0.5  # of the knee: from there on one percent more tokens cost a third of a percent of a step's time or more


@dataclass(frozen=True, slots=True)
class Entrant:
    """A request that could speculate, with a drafter for it."""

    request_id: str
    drafter_id: str
    acceptance_rate: float
    max_length: int
    worth: float = 1.0  # of its tokens: an urgent request's count for more

    def plan(self, length: int, reason: EnabledReason) -> SpeculationPlan:
        return SpeculationPlan(
            drafter_id=self.drafter_id,
            draft_length=length,
            enabled_reason=reason,
            is_pinned=reason is EnabledReason.PINNED,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided about the requests that could speculate."""

    memory: VerifierMemory
    plans: dict[str, SpeculationPlan]
    default_plan: SpeculationPlan
    price: float | None = None


@dataclass(frozen=True, slots=True)
class _Weighed:
    """What entrants gain at a price."""

    lengths: dict[str, int]  # positions that pay, by request
    gain: float  # of the one that gains most: tokens with drafts over tokens without; 0: nobody may draft
    price: float


@dataclass(frozen=True, slots=True)
class Judge:
    """One decision about one verifier, whose report has a price."""

    report: VerifierReport
    policy: RouterPolicy
    now_s: float

    def decide(
        self,
        memory: VerifierMemory,
        entrants: Sequence[Entrant],
        newcomer: Entrant | None,
        no_drafter: DisabledReason,
    ) -> Verdict:
        """Move the verifier's switch, then, if it is on, the requests' own."""
        memory = self._heed_price(memory)
        contenders = [entrant for entrant in entrants if not self._is_hopeless(memory, entrant)]
        judged = contenders or ([newcomer] if newcomer else [])
        if not judged:  # nobody to judge by: all that is left is hopeless or has no drafter
            switch = memory.switch or SpeculationSwitch(True, self.now_s)
            return self._by_request(replace(memory, switch=switch), entrants, self._weigh(memory, []), off(no_drafter))
        whole = self._weigh(memory, judged)
        switch = self._verifier_switch(memory.switch, whole.gain)
        if not switch.is_on:
            return replace(self._all_off(replace(memory, switch=switch), entrants, judged), price=whole.price)
        if memory.switch is not None and not memory.switch.is_on:
            memory = _all_switched_on(memory, contenders, self.now_s)
        handicapped = [self._handicapped(memory, entrant) for entrant in contenders]
        weighed = whole if handicapped == judged else self._weigh(memory, handicapped)
        default = off(no_drafter) if newcomer is None else self._default_plan(newcomer, weighed.price)
        return self._by_request(replace(memory, switch=switch), entrants, weighed, default)

    def _heed_price(self, memory: VerifierMemory) -> VerifierMemory:
        """Remember the verifier's price if it is more than a guess, which it is before the first drafts.

        While nobody decodes, it is that of a load that is gone.
        """
        if self.report.load.num_decoding == 0:
            return replace(memory, price=None)
        is_guess = memory.price is None and not self._is_drafting
        return memory if is_guess else replace(memory, price=self.report.load.price)

    @property
    def _is_drafting(self) -> bool:
        return any(request.draft_length > 0 for request in self.report.running)

    def _weigh(self, memory: VerifierMemory, entrants: Sequence[Entrant]) -> _Weighed:
        """Return which positions pay, and what the one that gains most gains."""
        price = max(memory.price or 0.0, self._least_price)
        lengths, gains = {}, [0.0]
        for entrant in entrants:
            rate, longest, own_price = entrant.acceptance_rate, entrant.max_length, price / entrant.worth
            lengths[entrant.request_id] = worth_length(rate, longest, own_price)
            if longest:
                gains.append(solo_gain(rate, longest, own_price))
        return _Weighed(lengths, max(gains), price)

    @property
    def _kv_pressure(self) -> float:
        """How near the KV pool is to its end: 0 below `kv_pressure_from`, 1 where it is full."""
        used, begin = self.report.load.kv_usage, self.policy.kv_pressure_from
        return (used - begin) / (1.0 - begin) if used > begin else 0.0

    @property
    def _least_price(self) -> float:
        return max(self.policy.min_price, self._kv_pressure)

    def _verifier_switch(self, switch: SpeculationSwitch | None, gain: float) -> SpeculationSwitch:
        if switch is None:
            wanting = self.report.running
            if all(item.num_speculative_tokens == 0 for item in wanting):
                return SpeculationSwitch(gain > self.policy.switch.on_gain, self.now_s)
            # the router is new, the verifier is not: it goes on as it does until a dwell has shown better
            switch = SpeculationSwitch(self._is_drafting, self.now_s)
        return switch.after(gain, self.now_s, self.policy.switch)

    def _all_off(self, memory: VerifierMemory, entrants: Sequence[Entrant], judged: Sequence[Entrant]) -> Verdict:
        """Switch every request off, except in the moments in which drafts are tried again."""
        assert memory.switch is not None
        reason = self._off_reason(memory, judged)
        if self._is_probing(memory.switch):
            return Verdict(memory, {entrant.request_id: self._probe(entrant) for entrant in entrants}, off(reason))
        return Verdict(memory, {entrant.request_id: off(reason) for entrant in entrants}, off(reason))

    def _off_reason(self, memory: VerifierMemory, judged: Sequence[Entrant]) -> DisabledReason:
        if all(self._is_low(entrant) for entrant in judged):
            return DisabledReason.LOW_ACCEPTANCE
        last = memory.default_plan.disabled_reason
        if last is not None and self._weigh(memory, judged).gain > self.policy.switch.on_gain:
            return last  # it would pay by now, but for the dwell
        return DisabledReason.LOAD if self._is_filled else DisabledReason.DRAFT_QUEUE

    @property
    def _is_filled(self) -> bool:
        """Return whether verifying costs what drafts do not bring; below that it is the wait for them."""
        knee = self.report.load.knee
        return self._kv_pressure > 0.0 or (knee is not None and self.report.load.num_decoding >= FILLED * knee)

    def _by_request(
        self, memory: VerifierMemory, entrants: Sequence[Entrant], weighed: _Weighed, default: SpeculationPlan
    ) -> Verdict:
        """Move every request's switch; one that is on keeps at least one position until its dwell is over."""
        plans, requests = {}, dict(memory.requests)
        for entrant in entrants:
            kept = requests[entrant.request_id]
            length = weighed.lengths.get(entrant.request_id, 0)
            switch = kept.switch.toward(length > 0, self.now_s, self.policy.switch)
            if switch is not kept.switch:
                requests[entrant.request_id] = replace(kept, switch=switch)
            if switch.is_on:
                plans[entrant.request_id] = self._on_plan(entrant, length, weighed.price)
            else:
                plans[entrant.request_id] = self._off_plan(entrant, switch)
        return Verdict(replace(memory, requests=requests), plans, default, weighed.price)

    def _on_plan(self, entrant: Entrant, length: int, price: float) -> SpeculationPlan:
        """Return how far one that is on may draft: the verifier prices each step, but not for lesser requests or KV."""
        reason = EnabledReason.PAYS if length > 0 else EnabledReason.DWELL
        if self._kv_pressure == 0.0 and entrant.worth >= 1.0:
            return entrant.plan(entrant.max_length, reason)
        is_pressed = price <= self._kv_pressure and 0 < length < entrant.max_length
        return entrant.plan(max(1, length), EnabledReason.KV_PRESSURE if is_pressed else reason)

    def _handicapped(self, memory: VerifierMemory, entrant: Entrant) -> Entrant:
        """Return the entrant as it competes: one that is off must be better by the margin, not as good."""
        if memory.requests[entrant.request_id].switch.is_on:
            return entrant
        return replace(entrant, acceptance_rate=entrant.acceptance_rate / self.policy.switch.on_gain)

    def _off_plan(self, entrant: Entrant, switch: SpeculationSwitch) -> SpeculationPlan:
        if not self._is_low(entrant):
            return off(DisabledReason.LOAD)
        return self._probe(entrant) if self._is_probing(switch) else off(DisabledReason.LOW_ACCEPTANCE)

    def _default_plan(self, newcomer: Entrant, price: float) -> SpeculationPlan:
        """Give a request that may arrive next the positions that are worth the price."""
        length = worth_length(newcomer.acceptance_rate, newcomer.max_length, price)
        if length > 0:
            return self._on_plan(newcomer, length, price)
        return off(DisabledReason.LOW_ACCEPTANCE if self._is_low(newcomer) else DisabledReason.LOAD)

    def _is_hopeless(self, memory: VerifierMemory, entrant: Entrant) -> bool:
        return not memory.requests[entrant.request_id].switch.is_on and self._is_low(entrant)

    def _is_low(self, entrant: Entrant) -> bool:
        """Return whether not even an idle machine would bring the request's drafts back."""
        gain = solo_gain(entrant.acceptance_rate, entrant.max_length, self.policy.min_price)
        return gain <= self.policy.switch.on_gain

    def _is_probing(self, switch: SpeculationSwitch) -> bool:
        period_s = self.policy.probe_every_s + self.policy.probe_s
        return (self.now_s - switch.changed_s) % period_s >= self.policy.probe_every_s

    def _probe(self, entrant: Entrant) -> SpeculationPlan:
        return entrant.plan(min(self.policy.probe_length, entrant.max_length), EnabledReason.PROBE)


def _all_switched_on(memory: VerifierMemory, entrants: Sequence[Entrant], now_s: float) -> VerifierMemory:
    requests = dict(memory.requests)
    for entrant in entrants:
        requests[entrant.request_id] = replace(
            requests[entrant.request_id], switch=SpeculationSwitch(is_on=True, changed_s=now_s)
        )
    return replace(memory, requests=requests)
