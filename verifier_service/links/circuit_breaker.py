"""Stop asking a drafter that keeps failing, and find out with one probe at a time when it is well again."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.messages.engine import BreakerState


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """How many consecutive failures open the breaker, and how long it then stays open."""

    failure_threshold: int = 5
    open_s: float = 2.0
    probe_timeout_s: float = 2.0  # a probe without an outcome (its request was cancelled) makes room for the next

    def __post_init__(self) -> None:
        if self.failure_threshold < 1 or self.open_s <= 0 or self.probe_timeout_s <= 0:
            raise ValueError("failure_threshold, open_s and probe_timeout_s must be positive")


class CircuitBreaker:
    """A three-state breaker without a clock of its own: every call says what time it is.

    Failures are whatever its owner counts: rounds that missed their deadline, disconnects, bad drafts.
    """

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._state = BreakerState.CLOSED
        self._num_failures = 0  # consecutive
        self._retry_at_s = 0.0  # OPEN: when a probe may pass; HALF_OPEN: when the probe counts as lost
        self.num_opened = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    def state_at(self, now_s: float) -> BreakerState:
        """Return the state as of `now_s`: one that has been open for long enough may be probed."""
        is_over = self._state is BreakerState.OPEN and now_s >= self._retry_at_s
        return BreakerState.HALF_OPEN if is_over else self._state

    def would_allow(self, now_s: float) -> bool:
        """Return what `allow` would, without taking the place of a probe."""
        return self._state is BreakerState.CLOSED or now_s >= self._retry_at_s

    def allow(self, now_s: float) -> bool:
        """Return whether a call may be made now; in the half-open state only one probe at a time passes."""
        if self._state is BreakerState.CLOSED:
            return True
        if not self.would_allow(now_s):
            return False
        self._state = BreakerState.HALF_OPEN
        self._retry_at_s = now_s + self._config.probe_timeout_s
        return True

    def wait_s(self, now_s: float) -> float:
        """Return how long `allow` will go on refusing, if nothing is recorded meanwhile."""
        return 0.0 if self._state is BreakerState.CLOSED else max(0.0, self._retry_at_s - now_s)

    def record_success(self, now_s: float) -> None:
        """Close the breaker; a late answer to a call made before it opened does not count as the probe's."""
        if self._state is BreakerState.OPEN and now_s < self._retry_at_s:
            return
        self._state = BreakerState.CLOSED
        self._num_failures = 0

    def record_failure(self, now_s: float) -> None:
        """Count a failure: the probe's, or the last one of too many in a row, opens the breaker."""
        if self._state is BreakerState.OPEN:
            return
        self._num_failures += 1
        if self._state is BreakerState.HALF_OPEN or self._num_failures >= self._config.failure_threshold:
            self._state = BreakerState.OPEN
            self._retry_at_s = now_s + self._config.open_s
            self.num_opened += 1
