"""A drafter's yield: accepted tokens per round, over many requests. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

MIN_ROUNDS = 16.0  # with fewer, the yield is unknown
FADE = 1.0 - 1.0 / 128.0  # per round
RETRY_STEPS = 2000  # after so many steps without a round, the yield is unknown


@dataclass(slots=True)
class DraftYield:
    """Accepted tokens per round of a drafter's requests, rounds with a length of 0 included.

    An old yield becomes unknown, so that a poor drafter without requests gets another chance. Age is counted in steps
    with rounds of any drafter: while no drafter is available, no yield ages.
    """

    _num_rounds: float = 0.0
    _num_accepted: float = 0.0
    _last_step: int = 0

    def observe_rounds(self, num_rounds: int, step: int) -> None:
        """Count the drafter's rounds of a step."""
        if self._is_old(step):
            self._num_rounds = self._num_accepted = 0.0
        faded = FADE**num_rounds
        self._num_rounds = self._num_rounds * faded + num_rounds
        self._num_accepted *= faded
        self._last_step = step

    def observe_accepted(self, num_tokens: int) -> None:
        """Count accepted tokens of the drafts of counted rounds."""
        self._num_accepted += num_tokens

    def mean_at(self, step: int) -> float | None:
        """Return the accepted tokens per round; None: too few rounds, or the last one is too old."""
        if self._num_rounds < MIN_ROUNDS or self._is_old(step):
            return None
        return self._num_accepted / self._num_rounds

    def _is_old(self, step: int) -> bool:
        return step - self._last_step > RETRY_STEPS
