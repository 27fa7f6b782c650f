"""Drafts that are found and not computed: a drafter in this process looks them up in next to no time.

Such a drafter is asked for the longest draft allowed, whatever the price is; each draft then decides by its own
confidences what of it is verified. So a text that begins to repeat itself is followed at once, even after thousands of
rounds in which nothing was found. The price learns nothing from these drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.load_levels import LoadLevel

FREE_SHARE = 0.03  # of a plain step: a drafter that holds a step up for longer is priced as any other


@dataclass(slots=True)
class FoundDrafts:
    """The length to ask for, decided once per step for all its requests."""

    _known: tuple[bool, bool] | None = None  # drafts take no time; a token that is sure to be accepted would pay

    def end_step(self) -> None:
        """Forget what was decided for the last step."""
        self._known = None

    def ask_length(self, level: LoadLevel, base: StepShape, bound: int) -> int | None:
        """Return how many tokens to ask for; None: the drafts take time, so the price decides."""
        if self._known is None:
            takes_no_time = level.exposure.seconds(bound) <= FREE_SHARE * level.cost.seconds(base)
            self._known = takes_no_time, level.cost.best_length(base, (1.0,)) > 0
        takes_no_time, does_pay = self._known
        if not takes_no_time:
            return None
        return bound if does_pay else 0
