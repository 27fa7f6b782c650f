"""What a step costs: a profile measured at start, refitted to the steps that run.

The profile holds the shape of the curve, stairs and knees included. A few factors over it are fitted online by least
squares that forget (recursive least squares: Haykin, "Adaptive Filter Theory"; the prior does not fade, so that equal
steps leave the other factors where they were). Residuals are relative to the step and, beyond a few times their usual
size, count linearly (Huber 1964): a stall of the machine is no cost of tokens.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.pricing.experts_read import ExpertsRead

FADE = 0.98  # per step: a memory of about 50
# Weight of the prior of each factor, in steps: one for the profile's times, which were measured, and a tenth for slope,
# context and contention, which the profile does not tell. A hundredth for experts: where few are taken, their share
# hardly varies, and a stronger prior would be taken for the steps' own time.
PRIOR_STEPS = np.array([1.0, 0.1, 0.1, 0.1, 0.01])
CONTEXT_UNIT = 1 << 14  # KV positions that take about as long to read as the weights, as a guess
NUM_SPREADS = 3.0  # times their usual size, beyond which residuals count linearly
# The usual relative residual: at least a fiftieth, or every step of a quiet machine would be an outlier; at first a
# quarter, as far as a profile may be off.
MIN_SPREAD, FIRST_SPREAD = 0.02, 0.25
SPREAD_SMOOTHING = 0.1  # share of the last residual: after ten steps a noisy machine is known
MIN_SCALE = 0.02  # clamp: a step without time would make every draft free
BEYOND = 1.25  # times the largest known shape, from which steps count as extrapolated: contexts grow with every token

SCALE, SLOPE, CONTEXT, DRAFTING, EXPERTS = range(5)  # the factors
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepTimeModel:
    """Step time t(n) in seconds: piecewise linear, never falling, extrapolated by the last slope.

    Measured times that fall as n grows are noise: such neighbours get their mean (isotonic regression by pooling
    adjacent violators). A pooled end would look free beyond the profile, so there the slope is that between the middles
    of the last two pools.
    """

    num_tokens: tuple[int, ...]  # strictly rising
    seconds: tuple[float, ...]  # not falling
    tail_slope: float  # seconds per token beyond the last point

    @classmethod
    def from_points(cls, points: Iterable[StepTime]) -> StepTimeModel:
        """Fit to two token counts or more; raise `ValueError` for fewer or for a time that is not positive."""
        samples: dict[int, list[float]] = {}
        for point in points:
            if point.num_tokens < 1 or not (math.isfinite(point.seconds) and point.seconds > 0):
                raise ValueError(f"not a step time: {point.num_tokens} tokens in {point.seconds} s")
            samples.setdefault(point.num_tokens, []).append(point.seconds)
        if len(samples) < 2:
            raise ValueError("a step-time profile needs at least two distinct token counts")
        means = tuple((n, sum(times) / len(times)) for n, times in sorted(samples.items()))
        pools = _pool_violators([seconds for _, seconds in means])
        num_tokens = tuple(n for n, _ in means)
        seconds = tuple(seconds for size, seconds in pools for _ in range(size))
        return cls(num_tokens, seconds, _tail_slope(num_tokens, pools))

    def t(self, num_tokens: float) -> float:
        """Return the time of a step over `num_tokens`; below the first point that point's time."""
        if num_tokens <= self.num_tokens[0]:
            return self.seconds[0]
        left = bisect_right(self.num_tokens, num_tokens) - 1
        return self.seconds[left] + (num_tokens - self.num_tokens[left]) * self._segment_slope(left)

    def times(self, first: int, count: int) -> Floats:
        """Return t(first), t(first + 1) … `count` values: looked up, for all but the first time."""
        stop, size = first + count, len(self._table)
        if stop <= size:
            return self._table[first:stop]
        beyond = np.arange(max(first, size), stop) - self.num_tokens[-1]
        return np.concatenate((self._table[first:], self.seconds[-1] + beyond * self.tail_slope))

    @cached_property
    def _table(self) -> Floats:
        """t(0) … t(n) for the last known n."""
        return np.interp(np.arange(self.num_tokens[-1] + 1), self.num_tokens, self.seconds)

    def slope(self, num_tokens: int) -> float:
        """Return what one more token adds to a step over `num_tokens`, in seconds."""
        return self.t(num_tokens + 1) - self.t(num_tokens)

    def knee(self) -> float:
        """Return the token count from which the machine is compute-bound; infinity when it never is.

        That is the smallest n with n · t'(n) >= t(n) / 2: one percent more tokens cost half a percent more time or
        more. For t = max(a, b·n) and for t = a + b·n it is a / b. Slopes are taken over twice the tokens at least: a
        single stair of padded batches is no knee.
        """
        places = [0]
        for place, count in enumerate(self.num_tokens):
            if count >= 2 * self.num_tokens[places[-1]]:
                places.append(place)
        for left, right in itertools.zip_longest(places, places[1:]):
            begin, begin_s = self.num_tokens[left], self.seconds[left]
            if right is None:
                slope = self.tail_slope
            else:
                slope = (self.seconds[right] - begin_s) / (self.num_tokens[right] - begin)
            if slope <= 0.0:
                continue
            crossing = max(begin, (begin_s - slope * begin) / slope)
            if right is None or crossing < self.num_tokens[right]:
                return crossing
        return math.inf

    def _segment_slope(self, left: int) -> float:
        """Return the slope right of point `left`."""
        if left + 1 == len(self.num_tokens):
            return self.tail_slope
        return (self.seconds[left + 1] - self.seconds[left]) / (self.num_tokens[left + 1] - self.num_tokens[left])


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step's time depends on."""

    num_tokens: int  # computed
    num_context_tokens: int  # KV positions read, by all of its sequences together
    is_drafting: bool = False  # drafters work for it, before or meanwhile: they may share memory or cores with it


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextTime:
    """What reading KV was measured to take."""

    seconds: float  # per position
    num_tokens: int  # positions that were read for that


class CostModel:
    """The time of a step by its shape: scale · t(n) + excess beyond the profile + context + contention + experts read.

    The same class serves verifiers and drafters (a draft round's seconds over its tokens).
    """

    def __init__(
        self, profile: StepTimeModel, experts: ExpertShape | None = None, context: ContextTime | None = None
    ) -> None:
        """`experts` only of a mixture of experts, whose steps then have a term of their own for reading them.

        Without `context` it starts as free, and is learnt from the steps alone.
        """
        self.experts = None if experts is None else ExpertsRead(experts)
        self._context = context
        self.use_profile(profile)

    def use_profile(self, profile: StepTimeModel) -> None:
        """Go by another profile; what was learnt of the steps beside the last one is dropped."""
        context = self._context
        self._profile = profile
        num_factors = EXPERTS + (self.experts is not None)
        self._prior = np.eye(num_factors)[SCALE]  # of each factor, worth `_prior_steps`
        self._prior_steps = PRIOR_STEPS[:num_factors].copy()
        if context is not None:
            self._prior[CONTEXT] = context.seconds * CONTEXT_UNIT / profile.seconds[0]
            self._prior_steps[CONTEXT] = PRIOR_STEPS[SCALE]
        self._gram, self._moment = np.zeros((num_factors, num_factors)), np.zeros(num_factors)
        self._use_factors(self._prior)
        self._spread = FIRST_SPREAD
        self._context_tokens = 0.0  # of the last step
        self._max_tokens = profile.num_tokens[-1]
        # profiled sequences have one token each, but for those that the context was measured with
        self._max_context_tokens = max(profile.num_tokens[-1], 0 if context is None else context.num_tokens)

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take in how long a step took; what is no time is left out."""
        if not (math.isfinite(seconds) and seconds > 0.0) or shape.num_tokens < 1:
            return
        self._max_tokens = max(self._max_tokens, shape.num_tokens)
        self._max_context_tokens = max(self._max_context_tokens, shape.num_context_tokens)
        self._context_tokens = shape.num_context_tokens
        base_s = self._profile.t(shape.num_tokens)
        row = self._terms(shape, base_s) / base_s
        residual = abs(seconds / base_s - float(self._factors @ row))
        usual = NUM_SPREADS * self._spread
        weight = min(1.0, usual / residual) if residual > 0.0 else 1.0
        clipped = min(residual, 1.5 * usual)
        self._spread = max(MIN_SPREAD, self._spread + SPREAD_SMOOTHING * (clipped - self._spread))
        weighted = weight * row
        self._moment = FADE * self._moment + weighted * (seconds / base_s)
        self._gram = FADE * self._gram + weighted[:, None] * row
        self._use_factors(self._solved())

    def seconds(self, shape: StepShape) -> float:
        """Return the expected time of a step."""
        count, last = shape.num_tokens, self._profile.num_tokens[-1]
        scale = self._scale + self._drafting * shape.is_drafting
        seconds = scale * self._profile.t(count) + self._context_s * shape.num_context_tokens
        if count > last:
            seconds += self._more_slope(scale) * (count - last)
        return seconds if self.experts is None else seconds + float(self._experts_s(count))

    def seconds_with(self, shape: StepShape, count: int) -> Floats:
        """Return the times of a step with 0, 1 … `count` more tokens, whose sequences are in it already."""
        first, last = shape.num_tokens, self._profile.num_tokens[-1]
        scale = self._scale + self._drafting * shape.is_drafting
        times = scale * self._profile.times(first, count + 1) + self._context_s * shape.num_context_tokens
        if first + count > last:
            times = times + self._more_slope(scale) * np.maximum(0, np.arange(first, first + count + 1) - last)
        return times if self.experts is None else times + self._experts_s(np.arange(first, first + count + 1))

    def best_length(self, shape: StepShape, survivals: ArrayLike) -> NDArray[np.intp]:
        """Return how many more tokens of these chances make a step of one token a sequence bring most per second.

        Of rows of chances that each row's step would have alone: [..., length]; 0: no token.
        """
        chances = np.asarray(survivals, np.float64)
        seconds = self.seconds_with(shape, chances.shape[-1])
        tokens = shape.num_tokens + np.add.accumulate(chances, axis=-1)
        with_none = np.full((*tokens.shape[:-1], 1), float(shape.num_tokens))
        rates = np.concatenate((with_none, tokens), axis=-1) / seconds
        return rates.argmax(axis=-1)

    def is_extrapolating(self, shape: StepShape) -> bool:
        """Return whether a step is a quarter larger than all that was profiled or has run, or larger still."""
        return (
            shape.num_tokens > BEYOND * self._max_tokens or shape.num_context_tokens > BEYOND * self._max_context_tokens
        )

    def knee(self) -> float:
        """Return the token count from which the machine is compute-bound at the last step's context; see the profile's.

        Infinity when it never is.
        """
        counts, profile = self._profile.num_tokens, self._profile
        shapes = [StepShape(count, int(self._context_tokens)) for count in counts]
        tail_slope = self._scale * profile.tail_slope + self._more_slope(self._scale)
        return StepTimeModel(counts, tuple(map(self.seconds, shapes)), tail_slope).knee()

    def _more_slope(self, scale: float) -> float:
        """Return the seconds per token beyond the profile, more than it says."""
        profile, slope = self._profile, float(self._factors[SLOPE])
        return max(-scale * profile.tail_slope, slope * profile.seconds[-1] / profile.num_tokens[-1])

    def _terms(self, shape: StepShape, base_s: float) -> Floats:
        """Return what the factors multiply, in seconds; the profile's time of such a step is known."""
        first_s, last_s, last = self._profile.seconds[0], self._profile.seconds[-1], self._profile.num_tokens[-1]
        terms = [
            base_s,
            max(0, shape.num_tokens - last) * last_s / last,
            shape.num_context_tokens / CONTEXT_UNIT * first_s,
            base_s * shape.is_drafting,
        ]
        if self.experts is not None:
            terms.append(float(self.experts.share(shape.num_tokens)) * first_s)
        return np.array(terms)

    def _experts_s(self, counts: ArrayLike) -> Floats:
        """Return what reading experts adds to steps over so many tokens."""
        assert self.experts is not None
        return self._factors[EXPERTS] * self._profile.seconds[0] * self.experts.share(counts)

    def _use_factors(self, factors: Floats) -> None:
        self._factors = factors
        self._scale, self._drafting = float(factors[SCALE]), float(factors[DRAFTING])
        self._context_s = float(factors[CONTEXT]) / CONTEXT_UNIT * self._profile.seconds[0]  # per position

    def _solved(self) -> Floats:
        """Return the factors that fit best; what would make steps shorter is left out: context, contention, experts."""
        gram = self._gram + np.diag(self._prior_steps)
        moment = self._moment + self._prior_steps * self._prior
        free = np.arange(len(moment))
        while True:
            found = np.linalg.solve(gram[free[:, None], free], moment[free])
            wrong = (free >= CONTEXT) & (found < 0.0)
            if not wrong.any():
                break
            free = free[~wrong]
        factors = np.zeros(len(moment))
        factors[free] = found
        factors[SCALE] = max(MIN_SCALE, factors[SCALE])
        return factors


def _pool_violators(times: list[float]) -> list[tuple[int, float]]:
    """Merge neighbours until the times do not fall; return each pool's number of points and mean time."""
    pools: list[tuple[int, float]] = []
    for seconds in times:
        pool = (1, seconds)
        while pools and pools[-1][1] > pool[1]:
            size, mean_s = pools.pop()
            pool = (size + pool[0], (size * mean_s + pool[0] * pool[1]) / (size + pool[0]))
        pools.append(pool)
    return pools


def _tail_slope(num_tokens: tuple[int, ...], pools: list[tuple[int, float]]) -> float:
    if len(pools) == 1:
        return 0.0
    (size_before, before_s), (size, last_s) = pools[-2:]
    last, before = num_tokens[-size:], num_tokens[-size - size_before : -size]
    begin = before[-1] if size == 1 else sum(before) / size_before
    return (last_s - before_s) / (sum(last) / size - begin)
