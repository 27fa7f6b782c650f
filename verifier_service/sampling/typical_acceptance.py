"""Typical acceptance: a draft token is right when the target finds it likely enough (Medusa, Cai et al. 2024).

A token is taken if its target probability exceeds min(epsilon, delta * exp(-entropy of the target's law)): a less
certain target asks for less. The longest path of such tokens is committed, and then the last token is drawn from the
target's own law. This changes the law of the output, so it is opt-in and marked in the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.request import AcceptanceRule
from outrider.verifier_service.sampling.draft_rows import DraftRows, found_probs
from outrider.verifier_service.sampling.entries import VerificationEntry, first_rows


@dataclass(frozen=True, slots=True)
class TypicalRows:
    """The draft tokens that this rule judges."""

    rows: torch.Tensor  # int64 [num_tokens] the row after each token
    limits: torch.Tensor  # float64 [num_tokens, 2] epsilon and delta

    @classmethod
    def of(cls, entries: Sequence[VerificationEntry], device: torch.device) -> TypicalRows | None:
        """Return None if the entries have no such tokens."""
        rows: list[int] = []
        limits: list[tuple[float, float]] = []
        for entry, start in zip(entries, first_rows(entries), strict=True):
            if entry.rule is AcceptanceRule.TYPICAL:
                rows += range(start + 1, start + entry.num_rows)
                limits += [(entry.sampling.typical_epsilon, entry.sampling.typical_delta)] * (entry.num_rows - 1)
        return cls(*upload([np.array(rows, np.int64), np.array(limits)], device)) if rows else None

    def judge(self, probs: torch.Tensor, drafts: DraftRows, is_right: torch.Tensor) -> None:
        """Overwrite `is_right` for these rows: probs float32 [num_rows, vocab_size], is_right bool [num_rows]."""
        found = are_typical(probs, drafts.parents[self.rows], drafts.token_ids[self.rows], self.limits)
        is_right.index_copy_(0, self.rows, found)


def are_typical(
    target_probs: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Say of each token whether it is likely enough in its row of target_probs [num_rows, vocab_size].

    rows and token_ids int64 [num_tokens], limits float64 [num_tokens, 2] of epsilon and delta -> bool [num_tokens].
    """
    entropies = torch.special.entr(target_probs).sum(dim=1, dtype=torch.float64)  # [num_rows]
    epsilons, deltas = limits.unbind(1)
    thresholds = torch.minimum(epsilons, deltas * torch.exp(-entropies[rows]))
    return (found_probs(target_probs, rows, token_ids) > thresholds) & (token_ids < target_probs.shape[1])
