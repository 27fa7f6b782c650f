"""How fast a request's tokens come, beside how fast they should: what the router hears of a request with a target."""

from __future__ import annotations

from dataclasses import dataclass

RECENT_TOKENS = 16  # older tokens fade beyond this many


@dataclass(slots=True)
class InterTokenTime:
    """A request's target and its recent time per committed token, exponentially weighted by tokens.

    Time in which the request was preempted or waited for its draft counts: its client waits as well. The first token
    has none before it, so its own time does not.
    """

    target_ms: float
    recent_ms: float | None = None  # None: nothing was committed after the first token yet
    _num_tokens: int = 0  # when something was last committed
    _committed_s: float | None = None

    def observe(self, num_tokens: int, now_s: float) -> None:
        """Take in that the request has `num_tokens` tokens by now; `now_s` is of one monotonic clock."""
        num_new = num_tokens - self._num_tokens
        if num_new == 0:
            return
        if self._committed_s is not None:
            token_ms = 1000.0 * (now_s - self._committed_s) / num_new
            known_ms = token_ms if self.recent_ms is None else self.recent_ms
            self.recent_ms = token_ms + (1.0 - 1.0 / RECENT_TOKENS) ** num_new * (known_ms - token_ms)
        self._num_tokens, self._committed_s = num_tokens, now_s
