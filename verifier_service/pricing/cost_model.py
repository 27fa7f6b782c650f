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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.pricing.experts_read import ExpertsRead

FADE = 0.98  # per step: a memory of about 50
# Weight of the prior of each factor, in steps: one for the profile's times, which were measured, and a tenth for slope,
# context and contention, which the profile does not tell. A hundredth for experts: where few are taken, their share
# hardly varies, and a stronger prior would be taken for the steps' own time.
PRIOR_STEPS = (1.0, 0.1, 0.1, 0.1, 0.01)
CONTEXT_UNIT = 1 << 14  # KV positions that take about as long to read as the weights, as a guess
NUM_SPREADS = 3.0  # times their usual size, beyond which residuals count linearly
# The usual relative residual: at least a fiftieth, or every step of a quiet machine would be an outlier; at first a
# quarter, as far as a profile may be off.
MIN_SPREAD, FIRST_SPREAD = 0.02, 0.25
SPREAD_SMOOTHING = 0.1  # share of the last residual: after ten steps a noisy machine is known
MIN_SCALE = 0.02  # clamp: a step without time would make every draft free
BEYOND = 1.25  # times the largest known shape, from which steps count as extrapolated: contexts grow with every token


@dataclass(frozen=True, slots=True)
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

    def times(self, first: int, count: int) -> list[float]:
        """Return t(first), t(first + 1) … `count` values: one walk instead of `count` searches."""
        times: list[float] = []
        n, stop = first, first + count
        while n < stop and n <= self.num_tokens[0]:
            times.append(self.seconds[0])
            n += 1
        while n < stop:
            left = bisect_right(self.num_tokens, n) - 1
            is_last = left + 1 >= len(self.num_tokens)
            end = stop if is_last else min(stop, self.num_tokens[left + 1])
            begin_n, begin_s, slope = self.num_tokens[left], self.seconds[left], self._segment_slope(left)
            times.extend([begin_s + (m - begin_n) * slope for m in range(n, end)])
            n = end
        return times

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
        experts, context = self.experts, self._context
        self._profile = profile
        self._num_factors = 4 if experts is None else 5
        self._prior = [1.0] + [0.0] * (self._num_factors - 1)  # of each factor, worth `_prior_steps`
        self._prior_steps = list(PRIOR_STEPS)
        if context is not None:
            self._prior[2] = context.seconds * CONTEXT_UNIT / profile.seconds[0]
            self._prior_steps[2] = PRIOR_STEPS[0]
        self._factors = list(self._prior)
        self._gram = [[0.0] * self._num_factors for _ in range(self._num_factors)]
        self._moment = [0.0] * self._num_factors
        self._spread = FIRST_SPREAD
        self._context_tokens = 0.0  # of the last step
        self._max_tokens = profile.num_tokens[-1]
        # profiled sequences have one token each, but for those that the context was measured with
        self._max_context_tokens = max(profile.num_tokens[-1], 0 if context is None else context.num_tokens)
        self._last, self._last_s = profile.num_tokens[-1], profile.seconds[-1]

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Take in how long a step took; what is no time is left out."""
        if not (math.isfinite(seconds) and seconds > 0.0) or shape.num_tokens < 1:
            return
        self._max_tokens = max(self._max_tokens, shape.num_tokens)
        self._max_context_tokens = max(self._max_context_tokens, shape.num_context_tokens)
        self._context_tokens = shape.num_context_tokens
        base_s = self._profile.t(shape.num_tokens)
        row = [term / base_s for term in self._terms(shape, base_s)]
        residual = abs(seconds / base_s - sum(f * x for f, x in zip(self._factors, row, strict=True)))
        usual = NUM_SPREADS * self._spread
        weight = min(1.0, usual / residual) if residual > 0.0 else 1.0
        clipped = min(residual, 1.5 * usual)
        self._spread = max(MIN_SPREAD, self._spread + SPREAD_SMOOTHING * (clipped - self._spread))
        for i, x in enumerate(row):
            self._moment[i] = FADE * self._moment[i] + weight * x * seconds / base_s
            self._gram[i] = [FADE * g + weight * x * other for g, other in zip(self._gram[i], row, strict=True)]
        self._factors = self._solved()

    def seconds(self, shape: StepShape) -> float:
        """Return the expected time of a step."""
        return self._fixed_s(shape) + self._token_times(shape.num_tokens, 1, self._scale(shape.is_drafting))[0]

    def seconds_with(self, shape: StepShape, count: int) -> list[float]:
        """Return the times of a step with 0, 1 … `count` more tokens, whose sequences are in it already."""
        fixed_s = self._fixed_s(shape)
        times = self._token_times(shape.num_tokens, count + 1, self._scale(shape.is_drafting))
        return [fixed_s + seconds for seconds in times]

    def best_length(self, shape: StepShape, survivals: Sequence[float]) -> int:
        """Return how many more tokens of these chances make a step of one token a sequence bring most per second."""
        seconds = self.seconds_with(shape, len(survivals))
        tokens = list(itertools.accumulate(survivals, initial=float(shape.num_tokens)))
        return max(range(len(seconds)), key=lambda count: tokens[count] / seconds[count])

    def is_extrapolating(self, shape: StepShape) -> bool:
        """Return whether a step is a quarter larger than all that was profiled or has run, or larger still."""
        return (
            shape.num_tokens > BEYOND * self._max_tokens or shape.num_context_tokens > BEYOND * self._max_context_tokens
        )

    def knee(self) -> float:
        """Return the token count from which the machine is compute-bound at the last step's context; see the profile's.

        Infinity when it never is.
        """
        counts = self._profile.num_tokens
        fixed_s = self._fixed_s(StepShape(counts[-1], int(self._context_tokens)))
        scale = self._scale(is_drafting=False)
        times = [scale * seconds for seconds in self._profile.seconds]
        seconds = tuple([fixed_s + time_s for time_s in self._with_experts(times, counts)])
        return StepTimeModel(counts, seconds, self._tail_slope(scale)).knee()

    def _scale(self, is_drafting: bool) -> float:
        return self._factors[0] + self._factors[3] * is_drafting

    def _tail_slope(self, scale: float) -> float:
        """Return the seconds per token beyond the profile."""
        return max(0.0, scale * self._profile.tail_slope + self._factors[1] * self._last_s / self._last)

    def _terms(self, shape: StepShape, base_s: float) -> list[float]:
        """Return what the factors multiply, in seconds; the profile's time of such a step is known."""
        first_s = self._profile.seconds[0]
        terms = [
            base_s,
            max(0, shape.num_tokens - self._last) * self._last_s / self._last,
            shape.num_context_tokens / CONTEXT_UNIT * first_s,
            base_s * shape.is_drafting,
        ]
        if self.experts is not None:
            terms.append(self.experts.share(shape.num_tokens) * first_s)
        return terms

    def _fixed_s(self, shape: StepShape) -> float:
        return self._factors[2] * shape.num_context_tokens / CONTEXT_UNIT * self._profile.seconds[0]

    def _token_times(self, first: int, count: int, scale: float) -> list[float]:
        """Return what `first`, `first` + 1 … tokens take, without their context."""
        last = self._last
        inside = max(0, min(count, last - first + 1))
        times = [scale * seconds for seconds in self._profile.times(first, inside)]
        if inside < count:
            at_last, slope = scale * self._last_s, self._tail_slope(scale)
            times.extend([at_last + (n - last) * slope for n in range(first + inside, first + count)])
        return self._with_experts(times, range(first, first + count))

    def _with_experts(self, times: list[float], counts: Sequence[int]) -> list[float]:
        """Add reading experts to the times of steps over so many tokens."""
        if self.experts is None:
            return times
        unit = self._factors[4] * self._profile.seconds[0]
        return [seconds + unit * self.experts.share(count) for seconds, count in zip(times, counts, strict=True)]

    def _solved(self) -> list[float]:
        """Return the factors that fit best; what would make steps shorter is left out: context, contention, experts."""
        free = list(range(self._num_factors))
        while True:
            gram = [[self._gram[i][j] + self._prior_steps[i] * (i == j) for j in free] for i in free]
            found = _solve(gram, [self._moment[i] + self._prior_steps[i] * self._prior[i] for i in free])
            wrong = [i for i, factor in zip(free, found, strict=True) if i >= 2 and factor < 0.0]
            if not wrong:
                break
            free = [i for i in free if i not in wrong]
        factors = [0.0] * self._num_factors
        for i, factor in zip(free, found, strict=True):
            factors[i] = factor
        factors[0] = max(MIN_SCALE, factors[0])
        return factors


def _solve(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Solve a small positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            share = row[i] / pivot[i]
            for j in range(i, len(row)):
                row[j] -= share * pivot[j]
    solution = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, len(rows)))
        solution[i] = (rows[i][-1] - known) / rows[i][i]
    return solution


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
