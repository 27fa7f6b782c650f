"""How long each draft of a simulated verifier is: as the router plans it, as the engine prices it, or by an oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from outrider.lab.simulate.accelerators import StepTiming
from outrider.lab.simulate.drafting import DraftSpeed, RoundLoad, SimulatedRound, choose_round
from outrider.lab.simulate.load import Acceptance, Floats, Ints
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.engine import NEVER, StepTime
from outrider.verifier_service.messages.request import Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import Ask, PricedStep
from outrider.verifier_service.scheduling.outcome import Outcome

ORACLE_PRICES = (*(0.02 * step for step in range(10)), *(0.2 + 0.05 * step for step in range(16)))
SAMPLING = SamplingParams(temperature=0.0)


class Row(NamedTuple):
    """A decoding request and the router's plan for it."""

    number: int
    plan: SpeculationPlan


class BatchSeen(NamedTuple):
    """What a verifier knows of its last rounds when it sets the lengths of the next ones."""

    load: RoundLoad  # of the last round
    prefill_share: float  # of the rounds since the last decision: computed prompts, too
    num_prefill_tokens: int  # of such a round, on average
    speed: DraftSpeed | None


class RoundSeen(NamedTuple):
    """A round that has run, and what became of its drafts, request by request as they had asked."""

    load: RoundLoad
    way: SimulatedRound
    accepted: Sequence[int]
    committed: Sequence[int]


class LengthPolicy(Protocol):
    """Sets draft lengths from what has been, never from the drafts that they concern."""

    @property
    def price(self) -> float | None: ...

    @property
    def knee(self) -> float | None: ...

    @property
    def is_every_round(self) -> bool:
        """Whether requests ask before every round, as in an engine; else lengths hold from report to report."""

    def decide(self, seen: BatchSeen, rows: Sequence[Row]) -> list[int]:
        """Take in a verifier's last rounds and return the draft length of every row."""

    def first_length(self, row: Row) -> int:
        """Return the draft length of a request that begins to decode."""

    def ask(self, rows: Sequence[Row]) -> list[int]:
        """Return how many tokens each row asks for before a round."""

    def admit(self, lengths: Sequence[int]) -> list[int]:
        """Return how many tokens of the drafts that came are verified, row by row as they asked; 0: none came."""

    def end_round(self, seen: RoundSeen) -> None:
        """Take in a round that rows had asked for."""

    def forget(self, number: int) -> None:
        """Take in that a request has ended."""


class _HeldLengths:
    """Lengths that hold from report to report: nobody asks between."""

    is_every_round = False

    def ask(self, rows: Sequence[Row]) -> list[int]:
        raise NotImplementedError("lengths are those of the last report")

    def admit(self, lengths: Sequence[int]) -> list[int]:
        return list(lengths)

    def end_round(self, seen: RoundSeen) -> None:
        pass

    def forget(self, number: int) -> None:
        pass


class PlannedLengths(_HeldLengths):
    """Every draft as long as its plan says: what a verifier does that does not price its steps."""

    price = None
    knee = None

    def decide(self, seen: BatchSeen, rows: Sequence[Row]) -> list[int]:
        return [row.plan.draft_length for row in rows]

    def first_length(self, row: Row) -> int:
        return row.plan.draft_length


class PricedLengths:
    """The engine's own `DraftPricing`, called before and after every round as the engine calls it.

    Drafts come without confidences. A round of two groups is two steps, in each of which the other half is held.
    Prompts that are computed count as tokens of their step, not as requests.
    """

    is_every_round = True

    def __init__(self, profile: Sequence[StepTime]) -> None:
        self._pricing = DraftPricing()
        self._pricing.use_profile(profile)
        self._requests: dict[int, Request] = {}
        self._asked: list[Request] = []  # before this round
        self._drafts: list[Draft | None] = []  # to be verified in it

    @property
    def price(self) -> float | None:
        return self._pricing.price

    @property
    def knee(self) -> float | None:
        return self._pricing.knee

    def decide(self, seen: BatchSeen, rows: Sequence[Row]) -> list[int]:
        raise NotImplementedError("rows ask before every round")

    def first_length(self, row: Row) -> int:
        return 0  # it asks before its first round

    def ask(self, rows: Sequence[Row]) -> list[int]:
        self._asked = [self._request(row) for row in rows]
        asked = self._pricing.ask_all([self._ask_of(request) for request in self._asked])
        lengths = [one.length for one in asked]
        self._pricing.learn()
        self._drafts = [None] * len(rows)
        return lengths

    def _request(self, row: Row) -> Request:
        if (request := self._requests.get(row.number)) is None:
            request = self._requests[row.number] = Request(
                request_id=str(row.number),
                sampling=SAMPLING,
                token_ids=[],
                num_prompt_tokens=0,
                plan=row.plan,
                arrival_s=0.0,
            )
        request.plan = row.plan
        return request

    def _ask_of(self, request: Request) -> Ask:
        drafter_id = request.plan.drafter_id
        return Ask(request, drafter_id or "", 0 if drafter_id is None else request.plan.draft_length)

    def admit(self, lengths: Sequence[int]) -> list[int]:
        asked = [(place, request, lengths[place]) for place, request in enumerate(self._asked) if lengths[place]]
        drafts = [(request, _draft(request, length)) for _, request, length in asked]
        for (place, *_), draft in zip(asked, self._pricing.admit_all(drafts), strict=True):
            self._drafts[place] = draft if draft.token_ids else None
        return [0 if draft is None else len(draft.token_ids) for draft in self._drafts]

    def end_round(self, seen: RoundSeen) -> None:
        way, load = seen.way, seen.load
        found = zip(self._asked, self._drafts, seen.accepted, seen.committed, strict=True)
        outcomes = [_outcome(*one) for one in found]
        exposed_s = (way.seconds - way.num_steps * way.step_s) / way.num_steps
        for group in range(way.num_steps):
            part = outcomes[group :: way.num_steps]
            num_drafted = sum(one.item.num_new_tokens - 1 for one in part)
            num_tokens = len(part) + num_drafted + load.num_prefill_tokens // way.num_steps
            shape = StepShape(num_tokens, num_drafted + load.num_context_tokens // way.num_steps)
            held = [] if way.num_steps == 1 else [one.item.request for one in outcomes[1 - group :: 2]]
            self._pricing.end_step(PricedStep(part, held, shape, step_s=way.step_s, exposed_s=exposed_s))

    def forget(self, number: int) -> None:
        if (request := self._requests.pop(number, None)) is not None:
            self._pricing.forget(request.request_id)


def _draft(request: Request, length: int) -> Draft:
    return Draft(request_id=request.request_id, round_id=0, position=0, token_ids=(0,) * length)


def _outcome(request: Request, draft: Draft | None, num_accepted: int, num_committed: int) -> Outcome:
    return Outcome.counted(
        request,
        draft,
        num_new_tokens=1 + (0 if draft is None else len(draft.token_ids)),
        num_committed=num_committed,
        num_accepted=min(num_accepted, num_committed),
    )


class OracleLengths(_HeldLengths):
    """The lengths with the most expected tokens per second, by the true survivals and the true times."""

    def __init__(self, acceptance: Acceptance, timing: StepTiming) -> None:
        self._acceptance, self._timing = acceptance, timing
        self.price: float | None = None
        self.knee: float | None = timing.knee()
        self._longest = 0

    def decide(self, seen: BatchSeen, rows: Sequence[Row]) -> list[int]:
        bound = max((row.plan.draft_length for row in rows), default=0)
        table = np.zeros((len(rows), bound))  # survivals
        for index, row in enumerate(rows):
            length = row.plan.draft_length
            table[index, :length] = self._acceptance.survivals(row.number, length)
        best_rate, best = self._rate(seen, table, np.zeros(len(rows), dtype=np.int64)), (NEVER, 0)  # price and longest
        for longest in range(1, bound + 1):
            for price in ORACLE_PRICES:
                rate = self._rate(seen, table, (table[:, :longest] > price).sum(axis=1))
                if rate > best_rate:
                    best_rate, best = rate, (price, longest)
        self.price, self._longest = best
        return [int(length) for length in (table[:, : self._longest] > self.price).sum(axis=1)]

    def first_length(self, row: Row) -> int:
        price = self.price
        if price is None:
            return row.plan.draft_length
        length = min(row.plan.draft_length, self._longest)
        return sum(survival > price for survival in self._acceptance.survivals(row.number, length))

    def _rate(self, seen: BatchSeen, table: Floats, lengths: Ints) -> float:
        """Return the expected tokens per second with such drafts."""
        counts = np.bincount(lengths, minlength=1)
        drafts = seen.load._replace(
            num_decoding=len(lengths),
            num_prefill_tokens=0,
            num_at_least=tuple(np.cumsum(counts[:0:-1])[::-1].tolist()),
        )
        expected = float(table[np.arange(table.shape[1]) < lengths[:, np.newaxis]].sum())
        rate = expected / max(1.0, expected + drafts.num_drafting)
        way = choose_round(drafts, self._timing, seen.speed, rate)
        ends = np.minimum(lengths, way.longest)
        expected = float(table[np.arange(table.shape[1]) < ends[:, np.newaxis]].sum())
        seconds = way.seconds
        if seen.prefill_share > 0.0:
            # prompts have to be computed anyhow: only what drafts add to such a round counts
            with_prompt = drafts._replace(num_prefill_tokens=seen.num_prefill_tokens)
            added_s = self._seconds(with_prompt, seen, rate) - self._seconds(_without_drafts(with_prompt), seen, rate)
            mean_s = self._seconds(_without_drafts(drafts), seen, rate) + added_s
            seconds += seen.prefill_share * (mean_s - way.seconds)
        return (drafts.num_decoding + way.share * expected) / seconds

    def _seconds(self, load: RoundLoad, seen: BatchSeen, rate: float) -> float:
        return choose_round(load, self._timing, seen.speed, rate).seconds


def _without_drafts(load: RoundLoad) -> RoundLoad:
    return load._replace(num_at_least=())
