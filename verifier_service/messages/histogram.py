"""Histograms with fixed buckets, as in Prometheus."""

from __future__ import annotations

import bisect
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramCounts:
    """A histogram's state: `counts[i]` values were at most `bounds[i]` and above the bound before it.

    The last count is for values above every bound. Without bounds, nothing was measured.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    total: float = 0.0  # the sum of all values


NO_VALUES = HistogramCounts()


class Histogram:
    """Counts values in buckets with ascending upper `bounds`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self.total += value

    def counts(self) -> HistogramCounts:
        """Return the present state."""
        return HistogramCounts(bounds=self._bounds, counts=tuple(self._counts), total=self.total)
