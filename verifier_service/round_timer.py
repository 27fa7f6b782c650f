"""Estimate how long to wait for a draft, from earlier rounds only (so that waiting cannot bias what is sampled)."""

from __future__ import annotations

SMOOTHING = 1 / 8  # gains of the mean and of its deviation, as TCP's retransmission timer uses them (RFC 6298)
DEVIATION_SMOOTHING = 1 / 4
NUM_DEVIATIONS = 4
NUM_LATE_DEVIATIONS = 2  # mean ones: nine of ten rounds take no longer


class RoundTimer:
    """A deadline for the next round: smoothed time plus four deviations, doubled after every round that missed it.

    `late_share` is the share of the rounds that missed theirs, the later ones counting more.
    """

    def __init__(self, *, first_s: float, min_s: float, max_s: float) -> None:
        self._first_s, self._min_s, self._max_s = first_s, min_s, max_s
        self.smoothed_s: float | None = None
        self.late_share = 0.0
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

    def observe(self, seconds: float, *, is_late: bool = False) -> None:
        """Take in the time of a round that was answered; that it was late, `back_off` has been told already."""
        self._back_off = 1
        if not is_late:
            self.late_share -= SMOOTHING * self.late_share
        if self.smoothed_s is None:
            self.smoothed_s, self._deviation_s = seconds, seconds / 2
            return
        self._deviation_s += DEVIATION_SMOOTHING * (abs(seconds - self.smoothed_s) - self._deviation_s)
        self.smoothed_s += SMOOTHING * (seconds - self.smoothed_s)

    def back_off(self) -> None:
        """Allow the next round more time: this one was not answered."""
        self._back_off = min(self._back_off * 2, 64)
        self.late_share += SMOOTHING * (1.0 - self.late_share)
