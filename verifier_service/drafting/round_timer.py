"""Estimate how long to wait for a draft, from earlier rounds only (so that waiting cannot bias what is sampled)."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMOOTHING = 1 / 8  # gains of the mean and of its deviation, as TCP's retransmission timer uses them (RFC 6298)
DEVIATION_SMOOTHING = 1 / 4
NUM_DEVIATIONS = 4
NUM_LATE_DEVIATIONS = 2  # mean ones: nine of ten rounds take no longer
LATE_MEMORY_S = 10.0  # a draft counts for the share of late ones as long as this, in the mean
NUM_ASSUMED_IN_TIME = 2.0  # drafts besides, which do not fade: single ones say little


class RoundTimer:
    """A deadline for the next round: smoothed time plus four deviations, doubled after every round that missed it."""

    def __init__(self, *, first_s: float, min_s: float, max_s: float) -> None:
        self._first_s, self._min_s, self._max_s = first_s, min_s, max_s
        self.smoothed_s: float | None = None
        self._deviation_s = 0.0
        self._back_off = 1

    @property
    def deadline_s(self) -> float:
        """Return how long to wait for the next draft."""
        if self.smoothed_s is None:
            # it has never answered: be ever less patient with it, but so that it still can
            return max(self._first_s / self._back_off, min(self._min_s, self._first_s))
        estimate_s = max(self.smoothed_s + NUM_DEVIATIONS * self._deviation_s, self._min_s)
        return min(estimate_s * self._back_off, self._max_s)

    @property
    def latest_s(self) -> float:
        """Return the time that nearly all rounds are answered in, once one has been."""
        return (self.smoothed_s or 0.0) + NUM_LATE_DEVIATIONS * self._deviation_s

    def observe(self, seconds: float) -> None:
        """Take in the time of a round that was answered, late or not."""
        self._back_off = 1
        if self.smoothed_s is None:
            self.smoothed_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += DEVIATION_SMOOTHING * (abs(seconds - self.smoothed_s) - self._deviation_s)
        self.smoothed_s += SMOOTHING * (seconds - self.smoothed_s)

    def back_off(self) -> None:
        """Allow the next round more time: this one was not answered."""
        self._back_off = min(self._back_off * 2, 64)


@dataclass(slots=True)
class LateShare:
    """The share of a drafter's drafts that missed their deadline, of many requests; what is long ago counts less.

    So a drafter that was slow and is not asked any more is given another chance. Of one that is asked less than about
    once a second the share is too low.
    """

    _num_late: float = 0.0
    _num_in_time: float = 0.0
    _at_s: float = 0.0  # when these counts were right

    def observe(self, now_s: float, *, is_late: bool) -> None:
        """Take in a draft, when it came or when its deadline passed."""
        self._fade(now_s)
        self._num_late += is_late
        self._num_in_time += not is_late

    def at(self, now_s: float) -> float:
        """Return the share, 0 to 1."""
        self._fade(now_s)
        return self._num_late / (self._num_late + self._num_in_time + NUM_ASSUMED_IN_TIME)

    def _fade(self, now_s: float) -> None:
        left = math.exp(min(0.0, self._at_s - now_s) / LATE_MEMORY_S)
        self._num_late, self._num_in_time = left * self._num_late, left * self._num_in_time
        self._at_s = max(self._at_s, now_s)
