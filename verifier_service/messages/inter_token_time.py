"""Time between a request's tokens, for requests with a target."""

from __future__ import annotations

from dataclasses import dataclass

RECENT_TOKENS = 16  # decay constant, in tokens


@dataclass(slots=True)
class InterTokenTime:
    """A request's target, and its recent time per committed token with exponential decay per token.

    Time in preemption, or waiting for a draft, counts: the client waits as well. The time to the first token does not.
    """

    target_ms: float
    recent_ms: float | None = None  # None: no second token yet
    _num_tokens: int = 0  # at the last commit
    _committed_s: float | None = None

    def observe(self, num_tokens: int, now_s: float) -> None:
        """Note that the request has `num_tokens` tokens at `now_s`, by one monotonic clock."""
        num_new = num_tokens - self._num_tokens
        if num_new == 0:
            return
        if self._committed_s is not None:
            token_ms = 1000.0 * (now_s - self._committed_s) / num_new
            known_ms = token_ms if self.recent_ms is None else self.recent_ms
            self.recent_ms = token_ms + (1.0 - 1.0 / RECENT_TOKENS) ** num_new * (known_ms - token_ms)
        self._num_tokens, self._committed_s = num_tokens, now_s
