"""How long drafts hold a verifier up: a part that does not depend on how long they are, and one that does.

Drafters work on the drafts of a step together, so what counts is the length of the longest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.verifier_service.pricing.cost_model import CostModel, StepShape
from outrider.verifier_service.pricing.step_price import MIN_GAIN, fade_over

FADE = 0.95  # per step that waited for drafts: a memory of 20, in which the load at the drafters changes
FORGET = 1.0 - 1.0 / 512.0  # per step that did not: what is not seen again is tried again
STALE = 0.01  # less is not left of anything: sums that fade for ever would underflow
FIRST_LENGTH = 2  # of drafts that nobody knows the time of: cheap to be wrong with, and the shortest that can be cut
ROUND_TRIP_WEIGHT = 0.01  # how firmly a round trip is taken to last as long as a token, until lengths have varied
QUICKER = 3.0  # times than all rounds before: those were first calls, and say nothing of the next
MIN_SPREAD = 0.5  # of that weight: lengths that vary less say less of what a position adds than the assumption does


@dataclass(slots=True)
class DraftExposure:
    """Least squares of seconds over draft lengths, drawn to a round trip as long as a token; both parts at least 0.

    A drafter in the verifier's own process is all exposure and nearly proportional, one behind a link is a round trip,
    and one that drafts while another group is verified costs nothing. To take its time for proportional before lengths
    have varied would keep drafts at one token, and no length would ever vary. Once a round is far quicker than all
    before, those are forgotten: they were first calls.
    """

    _weight: float = 0.0
    _lengths: float = 0.0  # sums, that fade
    _squares: float = 0.0
    _seconds: float = 0.0
    _products: float = 0.0
    _quickest_s: float = 0.0  # of all rounds, per position and round trip
    _freshness: float = 1.0  # what is left of it all since a step was taken in

    def observe(self, length: int, seconds: float) -> None:
        """Take in one step: how long a draft had been asked for at most, and how long it was held up."""
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
        """Take in a step for which no drafts were asked."""
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
        """Return how long drafting `length` tokens one after another is expected to hold a step up.

        The longer ago anything was seen, the less: what is feared is tried again at last.
        """
        return self._freshness * (self.fixed_s + length * self.level_s)

    @property
    def is_known(self) -> bool:
        """Whether a step has waited for drafts yet, or found that there is nothing to wait for."""
        return self._weight > 0.0

    def is_uniform_at(self, length: int) -> bool:
        """Whether lengths were too much alike to show what each position adds, and `length` once more would be so."""
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
    def level_s(self) -> float:
        """What each position adds."""
        if self._weight == 0.0:
            return 0.0
        length, seconds = self._mean_length, self._seconds / self._weight
        covariance = self._products / self._weight - length * seconds
        variance, pull = self._variance, self._pull
        slope = (covariance + pull * seconds / (length + 1.0)) / (variance + pull)
        return min(max(slope, 0.0), seconds / length)

    @property
    def fixed_s(self) -> float:
        """What the first position adds, besides."""
        if self._weight == 0.0:
            return 0.0
        return max(0.0, self._seconds / self._weight - self.level_s * self._mean_length)


class DraftDepth:
    """How long the longest draft should be: a position is drafted for all of a step's requests, or for none of them.

    Every length is tried on past steps, as `StepPrice` tries every price.
    """

    def __init__(self, cost: CostModel, exposure: DraftExposure) -> None:
        self._cost = cost
        self._exposure = exposure
        self._gains: list[float] = []  # by length: sums of log (tokens per second / without drafts), that fade
        self._num_steps = 0.0

    def observe(self, base: StepShape, offers: Sequence[Sequence[float]], price: float, num_steps: int = 1) -> None:
        """Take in a past step without its drafts, and the survivals that each request had on offer, by position.

        What does not exceed `price` would not have been verified. The step stands for `num_steps` that were alike.
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
        """The length that would have been best, at least 1, and the shortest of equals; None: any."""
        if not self._exposure.is_known:
            return FIRST_LENGTH
        if self._exposure.level_s <= 0.0 or not self._gains:
            return None
        good = max(self._gains) - MIN_GAIN * self._num_steps
        return 1 + next(place for place, gain in enumerate(self._gains) if gain >= good)

    @property
    def next_bound(self) -> int | None:
        """The length that the next drafts may have: half as long again while all of them were alike.

        Drafts of one length never show that longer ones would cost little more: whatever once made them short, they
        would stay so.
        """
        bound = self.bound
        return bound if bound is None or not self._exposure.is_uniform_at(bound) else bound + (bound + 1) // 2
