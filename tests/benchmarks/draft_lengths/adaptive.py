"""The adaptive policy of the replay: the engine's own survival estimates, cost model and step price.

What they are told is what an engine would tell them after a step: its shape and seconds, what was verified of each
request's draft, what was on offer. The cost model starts from a profile of short contexts, as an engine's does, at the
token counts at which vLLM captures graphs: powers of two alone would smear the knee, which costs 2 % where it matters.

Prompt lookup's tokens come with confidences, as from our own drafter: how often such copies were right lately, by the
length of the match and by how their context went on before. As in the engine, a position is asked for by history and
verified by its confidence. EAGLE's confidences were not recorded: history alone judges its drafts.

Where drafting takes the step's time, which drafters are used at all is a choice for the whole batch: EAGLE for one
request costs as much as for all. So each set of drafters has a price of its own, kept from step to step, and the set
is used that expects more tokens per second from what the past says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.draft_lengths.replay import EAGLE, NGRAM, Batch, Drafts, MachineFit, StepOutcome
from outrider.drafter_service.lookup.ngram_drafter import PRIOR
from outrider.drafter_service.lookup.token_history import AcceptanceEstimate
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.draft_pricing import PROBE_SHARE
from outrider.verifier_service.pricing.step_price import Slot, StepPrice
from outrider.verifier_service.pricing.survival import SurvivalEstimator
from outrider.verifier_service.pricing.token_worth import TokenWorth

PROFILED_TOKENS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), 1024, 2048)  # as vLLM captures its graphs
RATE_SHARE = 1 / 32  # of a step in the mean by which a set of drafters is chosen
EXPOSED_SHARE = 1 / 8  # of a step in how long drafting is expected to hold a step up
PROBE_EVERY = 16  # steps of a request without a draft, after which it drafts although it does not pay
OTHER_EVERY = 64  # the same of a drafter that a request does not use while it uses another
PROBE_LENGTH = 2
MAX_PROBES = 16  # in a step


@dataclass(slots=True)
class _Mode:
    """A set of drafters and what their drafts are worth."""

    drafters: tuple[int, ...]  # indices in the workload
    price: StepPrice
    exposed_s: float = 0.0  # how long drafting held a step up lately, whatever the lengths
    log_rate: float = 0.0  # of the tokens per second expected with it, over the last steps
    chosen: list[int] = field(default_factory=list)  # each request's drafter, in this step
    slots: list[Sequence[Slot]] = field(default_factory=list)  # each request's positions with that


class Adaptive:
    """Admit each position whose expected survival exceeds the price of the steps before this one."""

    def __init__(self, drafters: Sequence[str], machine: MachineFit) -> None:
        self._names = tuple(drafters)
        self._cost = CostModel(profile(machine))
        self._survival = SurvivalEstimator()
        self._copies = AcceptanceEstimate()  # prompt lookup's, by kind
        self._claims: list[list[float]] = []  # each request's confidences in them, in this step
        self._worth = TokenWorth()
        sets = [tuple(range(len(drafters)))]
        if EAGLE in drafters and NGRAM in drafters:
            sets.append((self._names.index(NGRAM),))
        self._modes = [_Mode(drafters=parts, price=StepPrice(self._cost)) for parts in sets]
        self._mode = self._modes[0]
        self._idle: dict[str, list[int]] = {}  # steps of each request since its last draft by each drafter
        self._probe_s = math.inf  # what probes may take now; after the first step no more than is saved at most

    def plan(self, batch: Batch) -> Drafts:
        self._claims = [[self._copies.rate(kind, PRIOR) for kind in kinds] for kinds in batch.ngram_kinds.tolist()]
        slots = [self._slots(batch, drafter) for drafter in range(len(self._names))]
        for mode in self._modes:
            _choose(mode, slots)
        plans = [[_length(mode.price, chain) for chain in mode.slots] for mode in self._modes]
        for mode, planned in zip(self._modes, plans, strict=True):
            mode.log_rate += RATE_SHARE * (math.log(self._rate(batch, mode, planned)) - mode.log_rate)
        best = max(range(len(self._modes)), key=lambda index: self._modes[index].log_rate)
        self._mode, lengths = self._modes[best], plans[best]
        drafters = list(self._mode.chosen)
        self._probe(batch, drafters, lengths)
        return Drafts(drafters=np.array(drafters), lengths=np.array(lengths))

    def _slots(self, batch: Batch, drafter: int) -> list[Sequence[Slot]]:
        """Return each request's positions with one drafter."""
        name, slots = self._names[drafter], list[Sequence[Slot]]()
        for request_id, offered, claims in zip(
            batch.request_ids, batch.offered[drafter].tolist(), self._claims, strict=True
        ):
            by_history = self._survival.survivals(request_id, name, offered) if offered else []
            expected = worths = self._worth.worths(request_id, by_history)
            if name == NGRAM and offered:
                survivals = self._survival.survivals(request_id, name, offered, claims)
                worths = self._worth.worths(request_id, survivals)
            slots.append(list(zip(worths, expected, strict=True)))
        return slots

    def observe(self, batch: Batch, drafts: Drafts, outcome: StepOutcome) -> None:
        num_drafted, is_finished = int(drafts.lengths.sum()), outcome.is_finished.tolist()
        base = StepShape(num_tokens=batch.size, num_context_tokens=batch.num_context_tokens)
        self._cost.observe(StepShape(batch.size + num_drafted, batch.num_context_tokens), outcome.step_s)
        most_s = 2.0 * (outcome.step_s + self._modes[0].exposed_s)  # what is left over does not pile up
        self._probe_s = min(self._probe_s + PROBE_SHARE * outcome.step_s / math.sqrt(batch.size), most_s)
        if num_drafted:
            self._observe_wait(drafts, outcome.draft_s)
        for mode in self._modes:
            slots = [slot for chain in mode.slots for slot in chain]
            mode.price.observe(base, batch.size, slots, exposed_s=mode.exposed_s)
        lengths, accepted = drafts.lengths.tolist(), outcome.accepted.tolist()
        committed = (1 + num_accepted for num_accepted in accepted)
        self._worth.observe(zip(batch.request_ids, committed, lengths, strict=True), self._mode.price.price)
        rounds = zip(batch.request_ids, drafts.drafters.tolist(), lengths, accepted, strict=True)
        is_offered = (batch.offered > 0).T.tolist()
        for lane, (request_id, drafter, length, num_accepted) in enumerate(rounds):
            idle = self._idle.setdefault(request_id, [0] * len(self._names))
            for other, was_offered in enumerate(is_offered[lane]):
                idle[other] += was_offered
            if length:
                idle[drafter] = 0
                self._observe_draft(batch, lane, self._names[drafter], length, num_accepted)
            else:
                self._survival.observe_plain(request_id)
            if is_finished[lane]:
                self._survival.forget(request_id)
                self._worth.forget(request_id)
                del self._idle[request_id]

    def _observe_draft(self, batch: Batch, lane: int, name: str, length: int, num_accepted: int) -> None:
        """Take in what became of one request's draft."""
        confidences = None
        if name == NGRAM:
            confidences = self._claims[lane][:length]
            for depth, kind in enumerate(batch.ngram_kinds[lane, : min(length, num_accepted + 1)].tolist()):
                self._copies.observe(kind, is_accepted=depth < num_accepted)
        self._survival.observe(
            batch.request_ids[lane],
            name,
            num_draft_tokens=length,
            num_accepted_tokens=num_accepted,
            confidences=confidences,
        )

    def _observe_wait(self, drafts: Drafts, draft_s: float) -> None:
        """Take in how long drafting held the step up: with EAGLE, or with prompt lookup alone."""
        used = {self._names[drafter] for drafter in drafts.drafters[drafts.lengths > 0].tolist()}
        mode = self._modes[0] if EAGLE in used else self._modes[-1]
        mode.exposed_s += (draft_s - mode.exposed_s) * (EXPOSED_SHARE if mode.exposed_s else 1.0)

    def _rate(self, batch: Batch, mode: _Mode, lengths: Sequence[int]) -> float:
        """Return the tokens per second that a mode expects of this step."""
        num_drafted = sum(lengths)
        drafts = [slot for chain, length in zip(mode.slots, lengths, strict=True) for slot in chain[:length]]
        expected = sum(worth for worth, _ in drafts)
        seconds = self._cost.seconds(StepShape(batch.size + num_drafted, batch.num_context_tokens))
        return (batch.size + expected) / (seconds + (mode.exposed_s if num_drafted else 0.0))

    def _probe(self, batch: Batch, drafters: list[int], lengths: list[int]) -> None:
        """Let requests draft with what they have not used for long: otherwise nobody would see it change.

        Where drafting holds everybody up the wait is the same for one as for many, so many probe at once, and seldom.
        """
        used = {self._names[drafter] for drafter, length in zip(drafters, lengths, strict=True) if length}
        shape = StepShape(batch.size + sum(lengths), batch.num_context_tokens)
        before_s, *_, after_s = self._cost.seconds_with(shape, PROBE_LENGTH)
        for other, name in enumerate(self._names):
            wait_s = 0.0 if name != EAGLE or EAGLE in used else self._modes[0].exposed_s
            if self._probe_s <= wait_s:
                continue  # the last probes are not paid for yet
            lanes = self._overdue(batch, other, drafters, lengths)[:MAX_PROBES]
            for lane in lanes:
                drafters[lane], lengths[lane] = other, PROBE_LENGTH
            if lanes:
                self._probe_s -= wait_s + len(lanes) * (after_s - before_s)

    def _overdue(self, batch: Batch, other: int, drafters: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return the requests that a drafter has not drafted for, longest first."""
        overdue: list[tuple[int, int]] = []
        for lane, (request_id, is_offered) in enumerate(zip(batch.request_ids, batch.offered[other] > 0, strict=True)):
            steps = self._idle[request_id][other] if request_id in self._idle else 0
            is_off = not lengths[lane]
            if is_offered and (is_off or drafters[lane] != other) and steps >= (PROBE_EVERY if is_off else OTHER_EVERY):
                overdue.append((steps, lane))
        return [lane for _, lane in sorted(overdue, reverse=True)]


def profile(machine: MachineFit) -> StepTimeModel:
    """Return what an engine measures when it starts: steps of short contexts."""
    counts = np.array(PROFILED_TOKENS, dtype=np.float64)
    seconds = machine.forward_s(counts, 0.0) + machine.overhead_s
    return StepTimeModel.from_points(
        StepTime(num_tokens=count, seconds=time_s) for count, time_s in zip(PROFILED_TOKENS, seconds, strict=True)
    )


def _length(price: StepPrice, chain: Sequence[Slot]) -> int:
    """Return how many positions are asked for and, once their draft is there, verified."""
    return min(price.asked([before for _, before in chain]), price.verified([worth for worth, _ in chain]))


def _choose(mode: _Mode, slots: Sequence[Sequence[Sequence[Slot]]]) -> None:
    """Give each request the drafter whose positions are worth most above the price; of equals the likelier one."""
    price, verifying = mode.price.price, mode.price.verifying_price

    def gain(chain: Sequence[Slot]) -> tuple[float, float]:
        taken = (worth for worth, before in chain if before > price and worth > verifying)
        return sum(worth - price for worth in taken), sum(worth for worth, _ in chain)

    mode.chosen = [max(mode.drafters, key=lambda drafter: gain(slots[drafter][lane])) for lane in range(len(slots[0]))]
    mode.slots = [slots[drafter][lane] for lane, drafter in enumerate(mode.chosen)]
