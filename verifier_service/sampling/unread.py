"""Draft tokens that nobody has read yet: a step verifies them where they were drafted, on the same device.

Of such a draft the host knows how long it is, and has a placeholder (`placeholder_token`) for each of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from outrider.verifier_service.messages.batch import placeholder_tokens
from outrider.verifier_service.messages.columns import Int64s
from outrider.verifier_service.model.paged_metadata import fill_placeholders


@dataclass(frozen=True, slots=True)
class UnreadTokens:
    """The tokens that placeholders stand for: point masses first, then those that were drawn."""

    numbers: torch.Tensor  # int64 [num_tokens]
    candidates: torch.Tensor  # int64 [num_drawn, num_candidates] the tokens that each of these was drawn from
    weights: torch.Tensor  # int64 [num_drawn, num_candidates] 0: not among them

    def fill(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return int64 [num_tokens] with the tokens in place of their placeholders, which are negative."""
        fill_placeholders(filled := token_ids.clone(), self.numbers)
        return filled

    def laws(self, placeholders: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what some tokens were drawn from: placeholders int64 [num_tokens].

        The law's tokens int64 [num_tokens, width], padded with `vocab_size`; its probabilities float64 alike; and where
        in there each token is, int64 [num_tokens].
        """
        ids = self.fill(placeholders)[:, None]
        if not len(self.candidates):
            return ids, torch.ones_like(ids, dtype=torch.float64), torch.zeros_like(placeholders)
        drawn = -1 - placeholders - (len(self.numbers) - len(self.candidates))
        is_drawn, rows = (drawn >= 0)[:, None], drawn.clamp(min=0)
        weights = self.weights[rows] * is_drawn
        token_ids = torch.where(weights > 0, self.candidates[rows], vocab_size)
        token_ids[:, :1] = torch.where(is_drawn, token_ids[:, :1], ids)
        is_token = token_ids == ids
        shares = weights.double() / weights.sum(dim=1, keepdim=True).clamp(min=1)
        return token_ids, torch.where(is_drawn, shares, is_token.double()), is_token.int().argmax(dim=1)


@dataclass(frozen=True, slots=True)
class UnreadChains:
    """Drafts, one after the other."""

    lengths: Int64s  # [num_chains]
    places: Int64s  # where the tokens of all chains are among …
    tokens: UnreadTokens  # … these

    def placeholders(self) -> list[tuple[int, ...]]:
        """Return the placeholders of each chain."""
        numbers, ends = placeholder_tokens(self.places), self.lengths.cumsum().tolist()
        return [tuple(numbers[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
