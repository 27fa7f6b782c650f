"""What a drafter brings: accepted tokens per round, of many requests. Pure Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 20.0  # what is longer ago counts e times less
MIN_ROUNDS = 16.0  # that still count: of fewer nothing is said


@dataclass(slots=True)
class DraftYield:
    """Accepted tokens per round of a drafter's requests, those in which it was not worth asking included.

    What is long ago counts less, and in the end not at all: so a drafter that was found to be poor and has no requests
    any more is given another chance.
    """

    _num_rounds: float = 0.0
    _num_accepted: float = 0.0
    _at_s: float = 0.0  # when these counts were right

    def observe_rounds(self, num_rounds: int, now_s: float) -> None:
        """Count rounds, however much is asked for in them."""
        self._fade(now_s)
        self._num_rounds += num_rounds

    def observe_accepted(self, num_tokens: int, now_s: float) -> None:
        """Take in how many tokens of counted rounds' drafts were accepted."""
        self._fade(now_s)
        self._num_accepted += num_tokens

    def at(self, now_s: float) -> float | None:
        """Return the accepted tokens per round; None: there were too few rounds lately."""
        self._fade(now_s)
        return self._num_accepted / self._num_rounds if self._num_rounds >= MIN_ROUNDS else None

    def _fade(self, now_s: float) -> None:
        left = math.exp(min(0.0, self._at_s - now_s) / MEMORY_S)
        self._num_rounds, self._num_accepted = left * self._num_rounds, left * self._num_accepted
        self._at_s = max(self._at_s, now_s)
