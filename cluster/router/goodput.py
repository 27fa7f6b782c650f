"""How much speculation pays: expected tokens per second, draft lengths by it, and a switch that does not flap.

Everything here looks at earlier rounds only (acceptance so far, the profile, the load), so a choice of length can not
depend on the tokens that will be drawn and the sampled law holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
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
from outrider.verifier_service.pricing.cost_model import StepTimeModel

NUM_EM_ROUNDS = 4
SAME_LOAD_SHARE = 0.75  # of the requests that decode: with fewer a price is another


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request that may speculate, with its estimated acceptance per position and its longest allowed draft."""

    request_id: str
    acceptance_rate: float
    max_length: int
    worth: float = 1.0  # of its tokens, beside a price that is said


@dataclass(frozen=True, slots=True)
class Allocation:
    """Draft lengths of the candidates (all named; 0 where nothing was admitted)."""

    lengths: dict[str, int]
    gain: float  # best throughput with at least one draft token ÷ throughput without any; 0 when there is no slot
    price: float  # committed tokens that the last admitted position costs: separates admitted from refused survivals


def allocate(
    candidates: Sequence[Candidate],
    *,
    num_decoding: int,
    step_time: StepTimeModel,
    min_price: float = 0.0,
    exposed_s: float = 0.0,
) -> Allocation:
    """Give draft positions to the requests that use them best, as long as the whole batch gets faster.

    Sort all (request, position) slots by survival a^j and take the prefix with the most expected tokens per second;
    every prefix is tried, since real step times have stairs. Slots of survival `min_price` or less are left out.
    `exposed_s` is the time that the batch waits for drafts as soon as one slot is taken. Equal survivals go to earlier
    positions first, then by a stable hash of the request id.
    """
    survivals, owners = _slots(candidates, min_price)
    order = sorted(range(len(survivals)), key=survivals.__getitem__, reverse=True)  # stable in reverse, too
    plain = num_decoding / step_time.t(num_decoding)
    best_size, best_rate, committed = 0, 0.0, float(num_decoding)
    for size, (slot, seconds) in enumerate(
        zip(order, step_time.times(num_decoding + 1, len(order)), strict=True), start=1
    ):
        committed += survivals[slot]
        rate = committed / (seconds + exposed_s)
        if rate > best_rate:
            best_size, best_rate = size, rate
    size = best_size if best_rate > plain else 0
    lengths = {candidate.request_id: 0 for candidate in candidates}
    for slot in order[:size]:
        lengths[owners[slot]] += 1
    marginal = max(best_rate, plain) * step_time.slope(num_decoding + size)
    if size < len(order):
        marginal = max(marginal, survivals[order[size]])
    if size > 0:
        marginal = min(marginal, survivals[order[size - 1]])
    return Allocation(lengths, best_rate / plain, max(marginal, min_price))


def _slots(candidates: Sequence[Candidate], min_price: float) -> tuple[list[float], list[str]]:
    """Return survival and owner of every slot, by position and then by the stable hash of the request id."""
    survivals: list[float] = []
    owners: list[str] = []
    ranked = sorted(candidates, key=lambda candidate: (stable_hash(candidate.request_id), candidate.request_id))
    alive = [(candidate, 1.0) for candidate in ranked]
    position = 0
    while alive:
        position += 1
        alive = [
            (candidate, survival * candidate.acceptance_rate)
            for candidate, survival in alive
            if position <= candidate.max_length and survival * candidate.acceptance_rate > min_price
        ]
        survivals.extend(survival for _, survival in alive)
        owners.extend(candidate.request_id for candidate, _ in alive)
    return survivals, owners


def allocate_at(candidates: Sequence[Candidate], price: float) -> Allocation:
    """Give each candidate the positions whose survival exceeds a price that somebody else has found.

    The gain is that of the candidate who gains most.
    """
    lengths = {
        candidate.request_id: worth_length(candidate.acceptance_rate, candidate.max_length, price / candidate.worth)
        for candidate in candidates
    }
    gains = (
        solo_gain(candidate.acceptance_rate, candidate.max_length, price / candidate.worth)
        for candidate in candidates
        if candidate.max_length
    )
    best = max(gains, default=0.0)
    return Allocation(lengths, best, price)


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
class Quote:
    """A price that a verifier said, and how many requests decoded then."""

    price: float
    num_decoding: int

    def is_of(self, num_decoding: int) -> bool:
        """Return whether it tells the price while so many requests decode: as many as then, by and large."""
        fewer, more = sorted((num_decoding, self.num_decoding))
        return fewer >= SAME_LOAD_SHARE * more


@dataclass(frozen=True, slots=True)
class VerifierMemory:
    """What is kept of one verifier between reports; the next report brings back what is lost, but the dwells."""

    switch: SpeculationSwitch | None = None  # None until there was something to decide
    pool: AcceptanceCounts = AcceptanceCounts()
    requests: Mapping[str, RequestMemory] = field(default_factory=dict)
    default_plan: SpeculationPlan = field(default_factory=lambda: off(DisabledReason.WARMUP))
    quote: Quote | None = None  # the last one

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
