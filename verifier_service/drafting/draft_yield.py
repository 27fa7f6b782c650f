"""What a drafter brings: accepted tokens per round, of many requests. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROUNDS = 16.0  # of fewer nothing is said
FADE = 1.0 - 1.0 / 128.0  # per round
RETRY_STEPS = 2000  # without a round: what is known then is too old


@dataclass(slots=True)
class DraftYield:
    """Accepted tokens per round of a drafter's requests, those in which it was not worth asking included.

    A drafter that was found to be poor, and has no requests any more, is so given another chance. Age is counted in the
    verifier's steps with such rounds, of whichever drafter: while nobody can draft, nothing is forgotten.
    """

    _num_rounds: float = 0.0
    _num_accepted: float = 0.0
    _last_step: int = 0

    def observe_rounds(self, num_rounds: int, step: int) -> None:
        """Count a step's rounds, however much is asked for in them."""
        if self._is_old(step):
            self._num_rounds = self._num_accepted = 0.0
        faded = FADE**num_rounds
        self._num_rounds = self._num_rounds * faded + num_rounds
        self._num_accepted *= faded
        self._last_step = step

    def observe_accepted(self, num_tokens: int) -> None:
        """Take in how many tokens of counted rounds' drafts were accepted."""
        self._num_accepted += num_tokens

    def at(self, step: int) -> float | None:
        """Return the accepted tokens per round; None: there were too few rounds, or none for long."""
        if self._num_rounds < MIN_ROUNDS or self._is_old(step):
            return None
        return self._num_accepted / self._num_rounds

    def _is_old(self, step: int) -> bool:
        return step - self._last_step > RETRY_STEPS
