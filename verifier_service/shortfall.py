"""What drafts cost beyond what a step's model knows of, measured: real steps beside those that it expects.

A request that waits for its draft misses steps, so that drafting makes small batches of a large one; drafters may share
cores, memory or a link with the verifier; messages take time. Rather than being modelled one by one, all of it is seen
in how many tokens plain decoding would have made in the same time. Tokens count as expected, by their survivals, so
that luck is no speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE = 1.0 - 1.0 / 32.0  # per step with drafts
FORGET = 1.0 - 1.0 / 512.0  # per step without: conditions change, so what is not seen again is tried again
PRIOR_STEPS = 4.0  # how many steps "as the model says" is worth


@dataclass(slots=True)
class _Level:
    """Sums over steps, that fade."""

    num_steps: float = 0.0
    log_gain: float = 0.0
    num_tokens: float = 0.0
    num_forgone: float = 0.0

    def fade(self, factor: float) -> None:
        self.num_steps *= factor
        self.log_gain *= factor
        self.num_tokens *= factor
        self.num_forgone *= factor

    @property
    def log_loss(self) -> float:
        if self.num_tokens <= 0.0:
            return 0.0
        expected, seen = self.log_gain / self.num_steps, math.log(self.num_tokens / self.num_forgone)
        return max(0.0, expected - seen) * self.num_steps / (self.num_steps + PRIOR_STEPS)


class Shortfall:
    """The loss at each level of load: requests by powers of two."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def observe(self, num_requests: int, *, log_gain: float, num_tokens: float, num_forgone: float) -> None:
        """Take in a step with drafts at a load of `num_requests`, those that missed it among them.

        `log_gain` is that of tokens per second by the model, `num_tokens` what the step was expected to bring, and
        `num_forgone` what plain decoding of all requests would have made in the time that it took.
        """
        level = self._levels.setdefault(num_requests.bit_length(), _Level())
        level.fade(FADE)
        level.num_steps += 1.0
        level.log_gain += log_gain
        level.num_tokens += num_tokens
        level.num_forgone += num_forgone

    def observe_plain(self, num_requests: int) -> None:
        """Take in a step without drafts."""
        if (level := self._levels.get(num_requests.bit_length())) is not None:
            level.fade(FORGET)

    def log_loss(self, num_requests: int) -> float:
        """Return what drafting takes off the logarithm of tokens per second, beyond what the model knows of."""
        level = self._levels.get(num_requests.bit_length())
        return 0.0 if level is None else level.log_loss
