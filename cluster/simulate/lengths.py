"""How long each draft of a simulated verifier is: as the router plans it, by the step price, or by an oracle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from outrider.cluster.simulate.accelerators import StepTiming
from outrider.cluster.simulate.drafting import DraftSpeed, RoundLoad, SimulatedRound, choose_round
from outrider.cluster.simulate.load import Acceptance, Floats, Ints
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import SpeculationPlan
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.step_price import NEVER, GridGains, Slot, StepPrice
from outrider.verifier_service.pricing.survival import SurvivalEstimator

ORACLE_PRICES = (*(0.02 * step for step in range(10)), *(0.2 + 0.05 * step for step in range(16)))
PROBE_PERIOD = 16  # one decision in so many lets requests draft a token that would draft none ...
PROBE_ROWS = 8  # ... one request in so many, each in its turn


class Row(NamedTuple):
    """A decoding request and the router's plan for it."""

    number: int
    plan: SpeculationPlan


class Rounds(NamedTuple):
    """A run of rounds: what was drafted and what was right, [num_rounds, num_requests]."""

    numbers: Ints
    lengths: Ints
    accepted: Ints


class BatchSeen(NamedTuple):
    """What a verifier knows of its last round when it sets the lengths of the next ones."""

    load: RoundLoad  # of the last round
    way: SimulatedRound
    prefill_share: float  # of the rounds since the last decision: computed prompts, too
    num_prefill_tokens: int  # of such a round, on average
    speed: DraftSpeed | None
    rounds: Rounds | None  # the last ones that ran


class LengthPolicy(Protocol):
    """Sets draft lengths from what has been, never from the drafts that they concern."""

    @property
    def price(self) -> float | None: ...

    @property
    def knee(self) -> float | None: ...

    def decide(self, seen: BatchSeen, rows: Sequence[Row]) -> list[int]:
        """Take in a verifier's last rounds and return the draft length of every row."""

    def first_length(self, row: Row) -> int:
        """Return the draft length of a request that begins to decode."""

    def forget(self, number: int) -> None:
        """Take in that a request has ended."""


class PlannedLengths:
    """Every draft as long as its plan says: what a verifier does that does not price its steps."""

    price = None
    knee = None

    def decide(self, seen: BatchSeen, rows: Sequence[Row]) -> list[int]:
        return [row.plan.draft_length for row in rows]

    def first_length(self, row: Row) -> int:
        return row.plan.draft_length

    def forget(self, number: int) -> None:
        pass


class PricedLengths:
    """What the engine does: the verifier's own cost model, survival estimates and step price, below the plans' bounds.

    An engine takes in every step; here `num_observed` rounds of each decision stand for all that ran since the last.
    """

    def __init__(self, profile: Sequence[StepTime], *, num_observed: int) -> None:
        self._cost = CostModel(StepTimeModel.from_points(profile))
        self._survival = SurvivalEstimator()
        self._step_price = StepPrice(self._cost)
        self._exposed_s = 0.0
        self._num_observed = num_observed
        self._num_decisions = 0
        self._prefill_rounds = 0.0  # that are to be observed

    @property
    def price(self) -> float | None:
        return self._step_price.price

    @property
    def knee(self) -> float | None:
        return self._cost.knee()

    def decide(self, seen: BatchSeen, rows: Sequence[Row]) -> list[int]:
        self._num_decisions += 1
        if seen.rounds is not None:
            self._observe_drafts(seen.rounds, {row.number: row.plan.drafter_id for row in rows})
        survivals = [self._survivals(row) for row in rows]
        self._observe_step(seen, survivals)
        return [self._length(row, chain) for row, chain in zip(rows, survivals, strict=True)]

    def first_length(self, row: Row) -> int:
        return self._length(row, self._survivals(row))

    def forget(self, number: int) -> None:
        self._survival.forget(str(number))

    def _length(self, row: Row, survivals: Sequence[float]) -> int:
        if row.plan.is_pinned:
            return row.plan.draft_length
        turn, place = divmod(self._num_decisions, PROBE_PERIOD)
        is_probed = bool(survivals) and place == 0 and (row.number + turn) % PROBE_ROWS == 0
        return max(self._step_price.asked(survivals), int(is_probed))

    def _survivals(self, row: Row) -> list[float]:
        if row.plan.drafter_id is None or row.plan.draft_length == 0:
            return []
        return self._survival.survivals(str(row.number), row.plan.drafter_id, row.plan.draft_length)

    def _observe_drafts(self, rounds: Rounds, drafter_ids: Mapping[int, str | None]) -> None:
        requests = [(str(number), drafter_ids.get(number)) for number in rounds.numbers.tolist()]
        for lengths, accepted in zip(
            rounds.lengths[-self._num_observed :].tolist(), rounds.accepted[-self._num_observed :].tolist(), strict=True
        ):
            for (request_id, drafter_id), length, num_accepted in zip(requests, lengths, accepted, strict=True):
                if length and drafter_id is not None:
                    self._survival.observe(
                        request_id, drafter_id, num_draft_tokens=length, num_accepted_tokens=num_accepted
                    )

    def _observe_step(self, seen: BatchSeen, offers: Sequence[Sequence[float]]) -> None:
        load, way = seen.load, seen.way
        num_tokens = (load.num_decoding + load.num_prefill_tokens + way.num_draft_tokens(load)) / way.num_steps
        self._cost.observe(StepShape(round(num_tokens), load.num_context_tokens // way.num_steps), way.step_s)
        if way.longest:  # how long its drafts held the round up; remembered while nothing is drafted
            self._exposed_s = way.seconds - way.num_steps * way.step_s
        self._observe_offers(seen, [(survival, survival) for chain in offers for survival in chain])

    def _observe_offers(self, seen: BatchSeen, slots: Sequence[Slot]) -> None:
        """Price as many steps as are observed, with their share of prompts; drafts come without confidences."""
        load = seen.load
        found: dict[int, GridGains] = {}  # by the tokens of such a step without drafts: most are alike
        steps: list[GridGains] = []
        for _ in range(self._num_observed):
            self._prefill_rounds += seen.prefill_share
            has_prefill = self._prefill_rounds >= 1.0
            self._prefill_rounds -= has_prefill
            if not slots or load.num_decoding < 1:
                continue
            num_plain = load.num_decoding + has_prefill * seen.num_prefill_tokens
            if num_plain not in found:
                shape = StepShape(num_plain, load.num_context_tokens)
                found[num_plain] = self._step_price.gains_at(shape, slots, self._exposed_s)
            steps.append(found[num_plain])
        self._step_price.observe_gains(steps)


class OracleLengths:
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

    def forget(self, number: int) -> None:
        pass

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
