"""Drafts that are found and not computed: a drafter in this process looks them up, in next to no time.

Such a drafter is asked for all that may be drafted, whatever the price of drafts says: what is worth verifying is
decided by each draft alone, once it is there. So a text that begins to repeat itself is followed at once, though
thousands of rounds before it found nothing. The price learns nothing from these drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.load_levels import LoadLevel
from outrider.verifier_service.pricing.offer import PricedRound

FREE_SHARE = 0.03  # of a step without drafts: who holds it up for longer is priced as any other drafter


@dataclass(slots=True)
class FoundDrafts:
    """Whether to ask for them: the same for all requests of a step."""

    _known: tuple[bool, bool] | None = None  # they take no time; a token that is sure to be right would pay

    def end_step(self) -> None:
        """Look again: another step has run."""
        self._known = None

    def ask(self, level: LoadLevel, base: StepShape, drafter_id: str, bound: int) -> PricedRound | None:
        """Return what to ask for; None: these drafts take time, and are to be priced."""
        if self._known is None:
            plain_s, drafted_s = level.cost.seconds_with(base, 1)
            does_pay = plain_s * (1 + base.num_tokens) > drafted_s * base.num_tokens
            self._known = level.exposure.seconds(bound) <= FREE_SHARE * plain_s, does_pay
        takes_no_time, does_pay = self._known
        if not takes_no_time:
            return None
        length = bound if does_pay else 0
        return PricedRound(drafter_id, bound, length, is_pinned=True, is_free=True, is_opening=False)
