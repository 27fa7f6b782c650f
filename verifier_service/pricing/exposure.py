"""Exposure, the time that a step waits for its drafts: a fixed part and a part per position.

Drafters work on all drafts of a step together, so the length of the longest one counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.verifier_service.pricing.cost_model import CostModel, StepShape
from outrider.verifier_service.pricing.step_price import MIN_GAIN, fade_over

FADE = 0.95  # per step with drafts: a memory of 20 steps, as the load at the drafters changes
FORGET = 1.0 - 1.0 / 512.0  # per step without drafts: old waits are forgotten slowly, so that drafts are retried
STALE = 0.01  # clamp on what is left: sums that fade for ever would underflow
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

    _weight: float = 0.0
    _lengths: float = 0.0  # fading sums
    _squares: float = 0.0
    _seconds: float = 0.0
    _products: float = 0.0
    _quickest_s: float = 0.0  # of all rounds, over length + 1
    _freshness: float = 1.0  # what is left of the sums since the last step with drafts

    def observe(self, length: int, seconds: float) -> None:
        """Learn from a step: the length of the longest draft asked for, and the wait."""
        each_s = seconds / (length + 1)
        are_first_calls = QUICKER * each_s < self._quickest_s
        self._quickest_s = min(each_s, self._quickest_s) if self.is_known else each_s
        self._fade(0.0 if are_first_calls else FADE)
        self._freshness = 1.0
        self._weight += 1.0
        self._lengths += length
        self._squares += length * length
        self._seconds += seconds
        self._products += length * seconds

    def observe_plain(self) -> None:
        """Count a step for which no drafts were asked."""
        if self._freshness > STALE:
            self._fade(FORGET)
            self._freshness *= FORGET

    def _fade(self, factor: float) -> None:
        self._weight *= factor
        self._lengths *= factor
        self._squares *= factor
        self._seconds *= factor
        self._products *= factor

    def seconds(self, length: int) -> float:
        """Return the expected wait for drafts of `length` tokens.

        It decays with the age of what is known, so that a length that once was slow is retried.
        """
        return self._freshness * (self.fixed_s + length * self.position_s)

    @property
    def is_known(self) -> bool:
        """Whether any step had drafts yet."""
        return self._weight > 0.0

    def is_uniform_at(self, length: int) -> bool:
        """Whether lengths have varied too little to tell a position's time, even with another draft of `length`."""
        is_uniform = self.is_known and self._variance < MIN_SPREAD * self._pull
        return is_uniform and self._mean_length < length + 0.5

    @property
    def _mean_length(self) -> float:
        return self._lengths / self._weight

    @property
    def _variance(self) -> float:
        return self._squares / self._weight - self._mean_length**2

    @property
    def _pull(self) -> float:
        return ROUND_TRIP_WEIGHT * self._mean_length**2

    @property
    def position_s(self) -> float:
        """Seconds that each position adds."""
        if self._weight == 0.0:
            return 0.0
        length, seconds = self._mean_length, self._seconds / self._weight
        covariance = self._products / self._weight - length * seconds
        variance, pull = self._variance, self._pull
        slope = (covariance + pull * seconds / (length + 1.0)) / (variance + pull)
        return min(max(slope, 0.0), seconds / length)

    @property
    def fixed_s(self) -> float:
        """Seconds that the first position adds besides."""
        if self._weight == 0.0:
            return 0.0
        return max(0.0, self._seconds / self._weight - self.position_s * self._mean_length)


class DraftDepth:
    """The best length of a step's longest draft: a position is drafted for all requests of a step together.

    Every length is tried on past steps, as `StepPrice` tries every price.
    """

    def __init__(self, cost: CostModel, exposure: DraftExposure) -> None:
        self._cost = cost
        self._exposure = exposure
        self._gains: list[float] = []  # by length: fading sums of log (tokens per second / without drafts)
        self._num_steps = 0.0

    def observe(self, base: StepShape, offers: Sequence[Sequence[float]], price: float, num_steps: int = 1) -> None:
        """Learn from a past step without its drafts, and the survivals by position that each request had on offer.

        Survivals up to `price` would not have been verified. The step stands for `num_steps` equal ones.
        """
        longest = max(map(len, offers), default=0)
        if not longest:
            return
        paying = [[survival for survival in survivals if survival > price] for survivals in offers]
        times = self._cost.seconds_with(base, sum(map(len, paying)))
        plain = math.log(base.num_tokens / times[0])
        num_tokens, num_slots = float(base.num_tokens), 0
        gains: list[float] = []
        for place in range(longest):
            at_place = [survivals[place] for survivals in paying if len(survivals) > place]
            num_tokens, num_slots = num_tokens + sum(at_place), num_slots + len(at_place)
            gains.append(math.log(num_tokens / (times[num_slots] + self._exposure.seconds(place + 1))) - plain)
        self._gains.extend(self._gains[-1:] * (longest - len(self._gains)) or [0.0] * (longest - len(self._gains)))
        gains.extend(gains[-1:] * (len(self._gains) - longest))
        fade, weight = fade_over(num_steps)
        self._gains = [fade * old + weight * gain for old, gain in zip(self._gains, gains, strict=True)]
        self._num_steps = fade * self._num_steps + weight

    @property
    def bound(self) -> int | None:
        """The best length, at least 1, the shortest of equal ones; None: any."""
        if not self._exposure.is_known:
            return FIRST_LENGTH
        if self._exposure.position_s <= 0.0 or not self._gains:
            return None
        good = max(self._gains) - MIN_GAIN * self._num_steps
        return 1 + next(place for place, gain in enumerate(self._gains) if gain >= good)

    @property
    def next_bound(self) -> int | None:
        """The longest that the next drafts may be: half as long again as `bound` while lengths have not varied.

        Drafts of one length cannot show that longer ones would cost little more, and would stay short for ever.
        """
        bound = self.bound
        return bound if bound is None or not self._exposure.is_uniform_at(bound) else bound + (bound + 1) // 2
