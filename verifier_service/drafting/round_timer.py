"""Estimate how long to wait for a draft, from earlier rounds only, so that waiting cannot bias sampled tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

SMOOTHING = 1 / 8  # gains of the mean and the mean deviation, as in TCP's retransmission timer (RFC 6298)
DEVIATION_SMOOTHING = 1 / 4
NUM_DEVIATIONS = 4
NUM_LATE_DEVIATIONS = 2  # nine of ten rounds are within two mean deviations
LATE_MEMORY_S = 10.0  # time constant of the late share's decay
NUM_ASSUMED_IN_TIME = 2.0  # prior: drafts in time, without decay, so that a single late one weighs little


class RoundTimer:
    """The next round's deadline: smoothed time plus four mean deviations, doubled after every missed round.

    `first_s`: deadline before the first answer. `min_s`, `max_s`: bounds after it.
    """

    def __init__(self, *, first_s: float, min_s: float, max_s: float) -> None:
        self._first_s, self._min_s, self._max_s = first_s, min_s, max_s
        self.smoothed_s: float | None = None
        self._deviation_s = 0.0
        self._back_off = 1

    @property
    def deadline_s(self) -> float:
        """Return how long to wait for the next draft."""
        if self.smoothed_s is None:
            # never answered: halve the deadline after each miss, down to `min_s`
            return max(self._first_s / self._back_off, min(self._min_s, self._first_s))
        estimate_s = max(self.smoothed_s + NUM_DEVIATIONS * self._deviation_s, self._min_s)
        return min(estimate_s * self._back_off, self._max_s)

    @property
    def latest_s(self) -> float:
        """Return the time within which nearly all rounds are answered; 0 before the first answer."""
        return (self.smoothed_s or 0.0) + NUM_LATE_DEVIATIONS * self._deviation_s

    def observe(self, seconds: float) -> None:
        """Count the time of an answered round, late or not."""
        self._back_off = 1
        if self.smoothed_s is None:
            self.smoothed_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += DEVIATION_SMOOTHING * (abs(seconds - self.smoothed_s) - self._deviation_s)
        self.smoothed_s += SMOOTHING * (seconds - self.smoothed_s)

    def back_off(self) -> None:
        """Count a missed round: double the next deadline (halve it before the first answer)."""
        self._back_off = min(self._back_off * 2, 64)


@dataclass(slots=True)
class LateShare:
    """The share of a drafter's drafts that missed their deadline, over many requests, with exponential decay.

    The decay gives a slow drafter that is no longer asked another chance. For a drafter that is asked less than about
    once a second the share is too low: the prior outweighs it.
    """

    _num_late: float = 0.0
    _num_in_time: float = 0.0
    _counted_s: float = 0.0  # time to which the counts have decayed

    def observe(self, now_s: float, *, is_late: bool, count: int = 1) -> None:
        """Count drafts when they arrive, or when their deadline passes."""
        num_late, num_in_time = self._decayed(now_s)
        self._num_late, self._num_in_time = num_late + is_late * count, num_in_time + (not is_late) * count
        self._counted_s = max(self._counted_s, now_s)

    def share_at(self, now_s: float) -> float:
        """Return the share, 0 to 1."""
        num_late, num_in_time = self._decayed(now_s)
        return num_late / (num_late + num_in_time + NUM_ASSUMED_IN_TIME)

    def _decayed(self, now_s: float) -> tuple[float, float]:
        left = math.exp(min(0.0, self._counted_s - now_s) / LATE_MEMORY_S)
        return left * self._num_late, left * self._num_in_time
