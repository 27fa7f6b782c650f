"""Exposure, the time that a step waits for its drafts: a fixed part and a part per position.

Drafters work on all drafts of a step together, so the length of the longest one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.verifier_service.pricing.cost_model import CostModel, StepShape
from outrider.verifier_service.pricing.fading import Fading
from outrider.verifier_service.pricing.request_table import Floats
from outrider.verifier_service.pricing.step_price import FADE as STEP_FADE
from outrider.verifier_service.pricing.step_price import MIN_GAIN

FADE = 0.95  # per step with drafts: a memory of 20 steps, as the load at the drafters changes
FORGET = 1.0 - 1.0 / 512.0  # per step without drafts: old waits are forgotten slowly, so that drafts are retried
STALE = 0.01  # clamp on what is left: what fades for ever would underflow
FIRST_LENGTH = 2  # of drafts before any wait is known: a short wait if wrong, and the shortest that can be cut
ROUND_TRIP_WEIGHT = 0.01  # of the prior that a round trip takes as long as a position, until lengths have varied
QUICKER = 3.0  # times as quick as all rounds before: those were first calls, and are forgotten
MIN_SPREAD = 0.5  # of that weight: lengths that vary less tell less of a position's time than the prior


@dataclass(slots=True)
class DraftExposure:
    """Least squares of seconds over draft lengths, with the prior that a round trip takes as long as a position.

    Both parts are clamped at 0. A drafter in the verifier's process is nearly proportional to the length, a drafter
    behind a link is mostly a round trip, and a drafter that works while another group is verified costs nothing. With a
    purely proportional prior, drafts would stay at one token and lengths would never vary.
    """

    fixed_s: float = 0.0  # that the first position adds besides …
    position_s: float = 0.0  # … what each position adds
    _weight: float = 0.0
    _length: float = 0.0  # fading means
    _square: float = 0.0
    _seconds: float = 0.0
    _product: float = 0.0
    _quickest_s: float = 0.0  # of all rounds, over length + 1
    _freshness: float = 1.0  # what is left of the sums since the last step with drafts

    def observe(self, length: int, seconds: float) -> None:
        """Learn from a step: the length of the longest draft asked for, and the wait."""
        each_s = seconds / (length + 1)
        are_first_calls = QUICKER * each_s < self._quickest_s
        self._quickest_s = min(each_s, self._quickest_s) if self.is_known else each_s
        # plain steps since have faded all before, too
        left = 0.0 if are_first_calls else FADE * self._freshness * self._weight
        self._weight, self._freshness = left + 1.0, 1.0
        share = 1.0 / self._weight
        self._length += share * (length - self._length)
        self._square += share * (length * length - self._square)
        self._seconds += share * (seconds - self._seconds)
        self._product += share * (length * seconds - self._product)
        pull = ROUND_TRIP_WEIGHT * self._length**2
        covariance = self._product - self._length * self._seconds
        slope = (covariance + pull * self._seconds / (self._length + 1.0)) / (self._variance + pull)
        self.position_s = min(max(slope, 0.0), self._seconds / self._length)
        self.fixed_s = max(0.0, self._seconds - self.position_s * self._length)

    def observe_plain(self) -> None:
        """Count a step for which no drafts were asked."""
        if self._freshness > STALE:
            self._freshness *= FORGET

    def seconds(self, length: int) -> float:
        """Return the expected wait for drafts of `length` tokens.

        It decays with the age of what is known, so that a length that once was slow is retried.
        """
        return self._freshness * (self.fixed_s + length * self.position_s)

    def seconds_down_to(self, length: int) -> Floats:
        """Return the expected waits for drafts of 1, 2 … `length` tokens."""
        return self._freshness * (self.fixed_s + np.arange(1.0, length + 1.0) * self.position_s)

    @property
    def is_known(self) -> bool:
        """Whether any step had drafts yet."""
        return self._weight > 0.0

    def is_uniform_at(self, length: int) -> bool:
        """Whether lengths have varied too little to tell a position's time, even with another draft of `length`."""
        is_uniform = self.is_known and self._variance < MIN_SPREAD * ROUND_TRIP_WEIGHT * self._length**2
        return is_uniform and self._length < length + 0.5

    @property
    def _variance(self) -> float:
        return self._square - self._length**2


class DraftDepth:
    """The best length of a step's longest draft: a position is drafted for all requests of a step together.

    Every length is tried on past steps, as `StepPrice` tries every price.
    """

    def __init__(self, cost: CostModel, exposure: DraftExposure) -> None:
        self._cost = cost
        self._exposure = exposure
        self._gains = Fading(STEP_FADE, 0.0, np.zeros(0))  # by length: log (tokens per second / without drafts)

    def observe(self, base: StepShape, offers: Floats, price: float, num_steps: int = 1) -> None:
        """Learn from a past step without its drafts, and what survivals each request had on offer: [rows, length].

        Survivals up to `price` would not have been verified; 0: no position. The step stands for `num_steps` equal
        ones.
        """
        longest = longest_of(offers)
        if not longest:
            return
        are_paying = offers[:, :longest] > price
        num_slots = np.add.accumulate(are_paying.sum(0))
        num_tokens = base.num_tokens + np.add.accumulate((offers[:, :longest] * are_paying).sum(0))
        times = self._cost.seconds_with(base, int(num_slots[-1]))
        took_s = times[num_slots] + self._exposure.seconds_down_to(longest)
        gains = np.log(num_tokens * times[0] / (took_s * base.num_tokens))
        known = self._gains.total
        width = max(longest, len(known))
        self._gains.total = _longer(known, width)
        self._gains.add(_longer(gains, width), num_steps)

    @property
    def bound(self) -> int | None:
        """The best length, at least 1, the shortest of equal ones; None: any."""
        if not self._exposure.is_known:
            return FIRST_LENGTH
        gains = self._gains.total
        if self._exposure.position_s <= 0.0 or not len(gains):
            return None
        return 1 + int(np.argmax(gains >= gains.max() - MIN_GAIN * self._gains.weight))

    def next_bound(self, bound: int) -> int:
        """Return how long the next drafts may be: half as long again as `bound` while lengths have not varied.

        Drafts of one length cannot show that longer ones would cost little more, and would stay short for ever.
        """
        return bound + (bound + 1) // 2 if self._exposure.is_uniform_at(bound) else bound


def longest_of(offers: Floats) -> int:
    """Return the length of the longest row; 0: no position."""
    return int(np.count_nonzero(offers.max(axis=0, initial=0.0)))


def _longer(gains: Floats, length: int) -> Floats:
    """Return gains by length as if longer drafts gained as much as the longest."""
    missing = length - len(gains)
    return np.append(gains, np.full(missing, gains[-1] if len(gains) else 0.0)) if missing else gains
