"""Means that fade: what is older counts less."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Fading:
    """The mean of values, or of arrays of values, in which each earlier one counts for less than the next."""

    fade: float  # per value
    weight: Any = 0.0  # of all values together
    total: Any = 0.0

    def add(self, mean: Any, count: Any = 1) -> None:
        """Count so many values by their mean, as if each were that."""
        left = self.fade**count
        added = (1.0 - left) / (1.0 - self.fade)
        self.weight = left * self.weight + added
        self.total = left * self.total + added * mean

    def mean(self, prior: Any, prior_weight: float) -> Any:
        """Return the mean of the values and a prior, worth so many values."""
        return (self.total + prior * prior_weight) / (self.weight + prior_weight)
