"""What a router learns of each request's acceptance, what drafts gain at a price, and a switch that does not flap.

Everything here looks at earlier rounds only (acceptance so far, prices), so a choice of length can not depend on the
tokens that will be drawn and the sampled law holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from outrider.cluster.router.fleet import (
    AcceptancePolicy,
    RequestLoad,
    RouterPolicy,
    SwitchPolicy,
    VerifierReport,
    off,
)
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan

NUM_EM_ROUNDS = 4  # until the rate of a request no longer moves in the third digit


def worth_length(acceptance_rate: float, max_length: int, price: float) -> int:
    """Return how many positions of a draft survive with a chance above `price`."""
    length, survival = 0, acceptance_rate
    while length < max_length and survival > price:
        length, survival = length + 1, survival * acceptance_rate
    return length


def stable_hash(text: str) -> int:
    """Return a hash that is the same in every process (Python's own is salted)."""
    return zlib.crc32(text.encode())


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """Draft tokens judged so far: `num_accepted` right ones and `num_rejected` rounds that a wrong one ended."""

    num_accepted: float = 0.0
    num_rejected: float = 0.0

    @property
    def num_judged(self) -> float:
        return self.num_accepted + self.num_rejected

    def rate(self, *, prior_rate: float, prior_tokens: float) -> float:
        """Return the posterior mean of the acceptance per position under a Beta prior."""
        return (self.num_accepted + prior_tokens * prior_rate) / (self.num_judged + prior_tokens)

    def plus(self, other: AcceptanceCounts, *, memory_tokens: float) -> AcceptanceCounts:
        """Add newer outcomes and let the sum fade to at most `memory_tokens`."""
        accepted, rejected = self.num_accepted + other.num_accepted, self.num_rejected + other.num_rejected
        fade = min(1.0, memory_tokens / max(accepted + rejected, 1e-9))
        return AcceptanceCounts(accepted * fade, rejected * fade)


def solo_gain(acceptance_rate: float, max_length: int, price: float) -> float:
    """Return what one request gains at `price`: 1 + the best sum of (survival - price) over a draft of at least one."""
    survival = acceptance_rate
    gain = 1.0 + survival - price
    for _ in range(1, max_length):
        survival *= acceptance_rate
        if survival <= price:
            break
        gain += survival - price
    return gain


def judged_tokens(
    *, num_drafts: int, num_draft_tokens: int, num_accepted_tokens: int, expected_rate: float, expected_tokens: float
) -> AcceptanceCounts:
    """Return what `num_drafts` verified drafts say about the acceptance per position.

    A verification stops at its first wrong token, so accepted ÷ drafted is too low; what counts as a failure is a
    round that ended early, and how many did is not reported: it is expected at 1 - a^k, within what the counts allow,
    with a itself found by a few rounds of expectation maximisation from `expected_rate`, known from `expected_tokens`.
    """
    if num_drafts <= 0:
        return AcceptanceCounts()
    mean_length = max(1.0, num_draft_tokens / num_drafts)
    num_missed = max(0, num_draft_tokens - num_accepted_tokens)
    fewest, most = num_missed / mean_length, float(min(num_drafts, num_missed))
    rate, num_rejected = expected_rate, 0.0
    for _ in range(NUM_EM_ROUNDS):
        num_rejected = num_drafts * (1.0 - rate**mean_length)
        num_rejected = most if num_rejected > most else max(num_rejected, fewest)
        judged = num_accepted_tokens + num_rejected + expected_tokens
        rate = (num_accepted_tokens + expected_rate * expected_tokens) / judged
    return AcceptanceCounts(num_accepted_tokens, num_rejected)


@dataclass(frozen=True, slots=True)
class SpeculationSwitch:
    """On or off, with hysteresis: one for each verifier and one for each request."""

    is_on: bool
    changed_s: float
    pending_since_s: float | None = None  # since when the gain has asked for the other state

    def after(self, gain: float, now_s: float, policy: SwitchPolicy) -> SpeculationSwitch:
        """Return the state after seeing `gain`: it changes when the gain stayed past its threshold for the dwell."""
        return self.toward(gain >= policy.off_gain if self.is_on else gain > policy.on_gain, now_s, policy)

    def toward(self, is_wanted: bool, now_s: float, policy: SwitchPolicy) -> SpeculationSwitch:
        """Return the state after a wish: it changes when the wish has stayed for the dwell."""
        if is_wanted == self.is_on:
            return self if self.pending_since_s is None else SpeculationSwitch(self.is_on, self.changed_s)
        since_s = now_s if self.pending_since_s is None else self.pending_since_s
        dwell_s = policy.off_dwell_s if self.is_on else policy.on_dwell_s
        if now_s - since_s >= dwell_s:
            return SpeculationSwitch(not self.is_on, now_s)
        return SpeculationSwitch(self.is_on, self.changed_s, since_s)


@dataclass(frozen=True, slots=True)
class RequestMemory:
    """What is kept of one request between reports."""

    switch: SpeculationSwitch
    counts: AcceptanceCounts = AcceptanceCounts()
    seen: tuple[int, int, int] = (0, 0, 0)  # drafts, draft tokens, accepted tokens of the last report
    plan: SpeculationPlan | None = None  # as last decided


@dataclass(frozen=True, slots=True)
class VerifierMemory:
    """What is kept of one verifier between reports; the next report brings back what is lost, but the dwells."""

    switch: SpeculationSwitch | None = None  # None until there was something to decide
    pool: AcceptanceCounts = AcceptanceCounts()
    requests: Mapping[str, RequestMemory] = field(default_factory=dict)
    default_plan: SpeculationPlan = field(default_factory=lambda: off(DisabledReason.WARMUP))
    price: float | None = None  # the last one that its verifier said while requests decoded

    def pool_rate(self, policy: AcceptancePolicy) -> float:
        return self.pool.rate(prior_rate=policy.initial_rate, prior_tokens=policy.pool_prior_tokens)


def observe(report: VerifierReport, memory: VerifierMemory, policy: RouterPolicy, now_s: float) -> VerifierMemory:
    """Take the report's counters into the acceptance estimates; requests that are gone are forgotten.

    A router that has just started so finds again what it knew: counters are since a request's start, and whether it is
    on is what its verifier says.
    """
    prior_rate, news, requests = memory.pool_rate(policy.acceptance), [], {}
    starts_on = None if memory.switch is None else memory.switch.is_on and memory.default_plan.draft_length > 0
    for request in report.load.requests:
        kept = memory.requests.get(request.request_id)
        if kept is None:  # of a verifier that is new here, perhaps for the router itself is: as the request goes on
            is_on = request.draft_length > 0 if starts_on is None else starts_on
            kept = RequestMemory(SpeculationSwitch(is_on, now_s))
        requests[request.request_id], judged = _observe_request(request, kept, prior_rate, policy.acceptance)
        if judged is not None:
            news.append(judged)
    judged = AcceptanceCounts(sum(item.num_accepted for item in news), sum(item.num_rejected for item in news))
    pool = memory.pool.plus(judged, memory_tokens=policy.acceptance.pool_memory_tokens)
    return replace(memory, pool=pool, requests=requests)


def _observe_request(
    request: RequestLoad, kept: RequestMemory, prior_rate: float, policy: AcceptancePolicy
) -> tuple[RequestMemory, AcceptanceCounts | None]:
    """Return the request's new memory and what its rounds since the last report said, if there were any."""
    counters = (request.num_drafts, request.num_draft_tokens, request.num_accepted_tokens)
    if counters == kept.seen:
        return kept, None
    before = kept.seen
    if counters[0] < before[0] or counters[1] < before[1] or counters[2] < before[2]:
        before = (0, 0, 0)  # it has started anew
    news = judged_tokens(
        num_drafts=counters[0] - before[0],
        num_draft_tokens=counters[1] - before[1],
        num_accepted_tokens=counters[2] - before[2],
        expected_rate=kept.counts.rate(prior_rate=prior_rate, prior_tokens=policy.request_prior_tokens),
        expected_tokens=kept.counts.num_judged + policy.request_prior_tokens,
    )
    counts = kept.counts.plus(news, memory_tokens=policy.request_memory_tokens)
    return RequestMemory(kept.switch, counts, counters, kept.plan), news
