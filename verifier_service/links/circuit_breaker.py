"""A circuit breaker: stop calling a drafter that keeps failing, and probe it until it answers again."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.messages.engine import BreakerState


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerConfig:
    """Consecutive failures that open the breaker, and how long it stays open."""

    failure_threshold: int = 5
    open_s: float = 2.0
    probe_timeout_s: float = 2.0  # a probe without an outcome (its request was cancelled) counts as lost

    def __post_init__(self) -> None:
        if self.failure_threshold < 1 or self.open_s <= 0 or self.probe_timeout_s <= 0:
            raise ValueError("failure_threshold, open_s and probe_timeout_s must be positive")


class CircuitBreaker:
    """A three-state breaker; every call gets the time.

    Its owner defines a failure: a missed deadline, a disconnect, a bad draft.
    """

    def __init__(self, config: BreakerConfig | None = None) -> None:
        self._config = config or BreakerConfig()
        self._state = BreakerState.CLOSED
        self._num_failures = 0  # consecutive
        self._retry_at_s = 0.0  # OPEN: when a probe is allowed; HALF_OPEN: when the probe counts as lost
        self.num_opened = 0

    @property
    def state(self) -> BreakerState:
        return self._state

    def state_at(self, now_s: float) -> BreakerState:
        """Return the state at `now_s`: HALF_OPEN once an open breaker allows a probe."""
        is_over = self._state is BreakerState.OPEN and now_s >= self._retry_at_s
        return BreakerState.HALF_OPEN if is_over else self._state

    def would_allow(self, now_s: float) -> bool:
        """Return what `allow` would return, without starting a probe."""
        return self._state is BreakerState.CLOSED or now_s >= self._retry_at_s

    def allow(self, now_s: float) -> bool:
        """Return whether a call may be made now. Unless the breaker is closed, the call is the only probe in flight."""
        if self._state is BreakerState.CLOSED:
            return True
        if not self.would_allow(now_s):
            return False
        self._state = BreakerState.HALF_OPEN
        self._retry_at_s = now_s + self._config.probe_timeout_s
        return True

    def wait_s(self, now_s: float) -> float:
        """Return how long `allow` will still refuse, if nothing is recorded meanwhile."""
        return 0.0 if self._state is BreakerState.CLOSED else max(0.0, self._retry_at_s - now_s)

    def record_success(self, now_s: float) -> None:
        """Close the breaker, unless it is open: then the answer is to a call from before."""
        if self._state is BreakerState.OPEN and now_s < self._retry_at_s:
            return
        self._state = BreakerState.CLOSED
        self._num_failures = 0

    def record_failure(self, now_s: float) -> None:
        """Count a failure; a failed probe, or `failure_threshold` failures in a row, open the breaker."""
        if self._state is BreakerState.OPEN:
            return
        self._num_failures += 1  # of a probe, too: what opened the breaker still counts
        if self._num_failures >= self._config.failure_threshold:
            self._state = BreakerState.OPEN
            self._retry_at_s = now_s + self._config.open_s
            self.num_opened += 1
