"""Probes: short drafts made although they are not expected to pay, so that the survival of drafts stays known."""

from __future__ import annotations

import math
from dataclasses import dataclass

PROBE_ROUNDS = 16  # rounds without drafts before a request may probe: the other requests probe, too
PROBE_LENGTH = 2  # tokens: the first position tells whether drafts are right, the second what one more costs
PROBE_SHARE = 0.01  # of the step time of one request; of n requests divided by the root of n: their probes add up
MAX_SAVED_STEPS = 50.0  # clamp on the budget, in steps' grants: unused budget must not end in a burst of probes


@dataclass(slots=True)
class ProbeBudget:
    """What probes may cost: a share of step time."""

    _seconds: float = 0.0

    def earn(self, step_s: float, num_requests: int) -> None:
        """Add the share of a step with this many priced requests."""
        granted_s = PROBE_SHARE * step_s / math.sqrt(max(1, num_requests))
        self._seconds = min(self._seconds + granted_s, MAX_SAVED_STEPS * granted_s)

    def spend(self, seconds: float) -> None:
        """Charge probes with their expected cost, or with what they were seen to cost beyond it."""
        self._seconds -= seconds

    @property
    def is_left(self) -> bool:
        """Whether a request that has not drafted for `PROBE_ROUNDS` may probe."""
        return self._seconds > 0.0
