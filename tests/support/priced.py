"""A step's questions to pricing, put for one request alone."""

from __future__ import annotations

from outrider.verifier_service.messages.draft import NO_NEEDS, Draft, DraftNeeds
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import Ask, AskLength


def ask(
    pricing: DraftPricing, request: Request, drafter_id: str, bound: int, needs: DraftNeeds = NO_NEEDS
) -> AskLength:
    return pricing.ask_all([Ask(request, drafter_id, bound, needs)])[0]


def admit(pricing: DraftPricing, request: Request, draft: Draft) -> Draft:
    return pricing.admit_all([(request, draft)])[0]
