"""Drafts that nobody expects to pay, made so that it stays known what drafts are worth."""

from __future__ import annotations

import math
from dataclasses import dataclass

PROBE_ROUNDS = 16  # a request without drafts tries one every so many of its rounds, at most: others probe, too
PROBE_LENGTH = 2  # of a probe: the first position says whether drafts are right, the second what one more costs
PROBE_SHARE = 0.01  # of the time of steps of one request; of n, over the root of n: there are more to probe
MAX_SAVED_STEPS = 50.0  # of that share: what is left over does not pile up to end in a burst of probes


@dataclass(slots=True)
class ProbeBudget:
    """What probes may cost: a share of the time that steps take."""

    _seconds: float = 0.0

    def earn(self, step_s: float, num_requests: int) -> None:
        """Take in a step of so many requests that are priced."""
        granted_s = PROBE_SHARE * step_s / math.sqrt(max(1, num_requests))
        self._seconds = min(self._seconds + granted_s, MAX_SAVED_STEPS * granted_s)

    def spend(self, seconds: float) -> None:
        """Charge probes with what they are expected to cost, or were seen to."""
        self._seconds -= seconds

    def allow(self, num_rounds_off: int) -> bool:
        """Tell whether a request may probe that has not drafted for so many rounds: not while others are unpaid."""
        return num_rounds_off + 1 >= PROBE_ROUNDS and self._seconds > 0.0
