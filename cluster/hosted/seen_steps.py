"""Learn what steps take from those that run, where no profile was measured at start."""

from __future__ import annotations

import collections

from outrider.verifier_service.messages.engine import StepTime

NUM_COLD_STEPS = 2  # at first: the engine warms up
MIN_STEPS, MAX_STEPS = 8, 64
MIN_SPREAD = 2.0  # times more tokens in the largest step than in the smallest


class SeenSteps:
    """Gather step times until they say what a token more costs; from then on the cost model follows by itself."""

    def __init__(self) -> None:
        self.profile: tuple[StepTime, ...] = ()
        self._num_cold = NUM_COLD_STEPS
        self._points: collections.deque[StepTime] = collections.deque(maxlen=MAX_STEPS)

    @property
    def are_alike(self) -> bool:
        """Whether enough steps were seen, but none that tells what a token more costs."""
        return not self.profile and len(self._points) >= MIN_STEPS

    def observe(self, num_tokens: int, seconds: float) -> bool:
        """Take in a step; return whether `profile` is there since just now."""
        if self.profile or num_tokens < 1 or seconds <= 0.0:
            return False
        if self._num_cold:
            self._num_cold -= 1
            return False
        self._points.append(StepTime(num_tokens=num_tokens, seconds=seconds))
        counts = [point.num_tokens for point in self._points]
        if len(counts) < MIN_STEPS or max(counts) < MIN_SPREAD * min(counts):
            return False
        self.profile, self._points = tuple(self._points), collections.deque()
        return True
