"""The time of a verifier's step as a function of its number of tokens, from measured points."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.verifier_service.engine_messages import StepTime


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
        more. For t = max(a, b·n) and for t = a + b·n it is a / b.
        """
        for left in range(len(self.num_tokens)):
            slope = self._segment_slope(left)
            if slope <= 0.0:
                continue
            begin = self.num_tokens[left]
            intercept = self.seconds[left] - slope * begin
            crossing = max(begin, intercept / slope)
            if left + 1 >= len(self.num_tokens) or crossing < self.num_tokens[left + 1]:
                return crossing
        return math.inf

    def _segment_slope(self, left: int) -> float:
        """Return the slope right of point `left`."""
        if left + 1 == len(self.num_tokens):
            return self.tail_slope
        return (self.seconds[left + 1] - self.seconds[left]) / (self.num_tokens[left + 1] - self.num_tokens[left])


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
