"""What drafts cost beyond what a step's model knows of, measured: real steps beside those that it expects.

A request that waits for its draft misses steps, so that drafting makes small batches of a large one; drafters may share
cores, memory or a link with the verifier; messages take time; a draft that was waited for may be empty. Rather than
being modelled one by one, all of it is seen in how many tokens plain decoding would have made in the same time. Tokens
count as expected, by their survivals, so that luck is no speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FADE = 1.0 - 1.0 / 32.0  # per step for which drafts were asked
FORGET = 1.0 - 1.0 / 512.0  # per step without: conditions change, so what is not seen again is tried again
PRIOR_STEPS = 4.0  # how many steps "as the model says" is worth


@dataclass(slots=True)
class Shortfall:
    """What drafting takes off the logarithm of tokens per second; sums over steps, that fade."""

    _num_steps: float = 0.0
    _num_drafted: float = 0.0  # of these, with drafts on offer, or while some were still waited for
    _log_gain: float = 0.0
    _num_made: float = 0.0  # plain steps that would have brought as many tokens
    _num_forgone: float = 0.0  # plain steps that would have taken as long

    def observe(self, *, log_gain: float | None, num_made: float, num_forgone: float) -> None:
        """Take in a step for which drafts were asked, those that missed it for theirs among its requests.

        `log_gain` is that of tokens per second by the model; None where nothing came and nothing is waited for, of
        which the model knows nothing: drafts were empty or too late. In plain steps of all requests, `num_made` is what
        the step was expected to bring, and `num_forgone` the time that it took.
        """
        self._fade(FADE)
        self._num_steps += 1.0
        if log_gain is not None:
            self._num_drafted += 1.0
            self._log_gain += log_gain
        self._num_made += num_made
        self._num_forgone += num_forgone

    def observe_plain(self) -> None:
        """Take in a step for which no drafts were asked."""
        self._fade(FORGET)

    def _fade(self, factor: float) -> None:
        self._num_steps *= factor
        self._num_drafted *= factor
        self._log_gain *= factor
        self._num_made *= factor
        self._num_forgone *= factor

    @property
    def log_loss(self) -> float:
        """What a step with drafts loses beyond what the model knows of, its share of the steps for which none came too.

        At least 0.
        """
        if self._num_made <= 0.0:
            return 0.0
        seen = self._num_steps * math.log(self._num_made / self._num_forgone)
        return max(0.0, self._log_gain - seen) / (self._num_drafted + PRIOR_STEPS)
