"""The target's law after each token of a lesson, as a loss reads it: whole, or of a few tokens per row.

A live teacher gives its whole law. What a service has kept of the target is its likeliest tokens, or the token that it
committed: a law of a few tokens, which never takes the space of a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TargetLaw(Protocol):
    """The target's law over a drafter's vocabulary."""

    @property
    def counted(self) -> Tensor:
        """bool [rows, window]; False: never drafted, or the likeliest token is not in the vocabulary."""

    def divergence(self, draft_logits: Tensor, start: int, roots: Tensor | None = None) -> Tensor:
        """Return the mean of KL(target || draft) over rows: cross-entropy to the target's law minus its entropy.

        draft_logits [rows, num_rows, draft_vocab_size] are compared with the target's rows from `start` on, or `start`
        after `roots`, int64 [num_rows]. Left out are rows whose likeliest token cannot be drafted (Li et al., 2025),
        and rows of a prompt.
        """


@dataclass(frozen=True, slots=True)
class DenseLaw:
    """A law with every token's probability."""

    probs: Tensor  # float32 [rows, window, draft_vocab_size]
    entropy: Tensor  # float32 [rows, window]
    counted: Tensor

    @classmethod
    def of(cls, probs: Tensor, counted: Tensor) -> DenseLaw:
        return cls(probs, torch.special.entr(probs).sum(-1), counted)

    def divergence(self, draft_logits: Tensor, start: int, roots: Tensor | None = None) -> Tensor:
        rows = rows_from(start, draft_logits, roots)
        draft_logprobs = draft_logits.float().log_softmax(-1)
        divergence = -(self.probs[:, rows] * draft_logprobs).sum(-1) - self.entropy[:, rows]
        return mean_of_counted(divergence, self.counted[:, rows])


@dataclass(frozen=True, slots=True)
class SparseLaw:
    """A law with some tokens' probabilities; all other tokens have none."""

    ids: Tensor  # int64 [rows, window, num_top], places in the drafter's vocabulary; any, where the probability is 0
    probs: Tensor  # float32 [rows, window, num_top]; of a counted row, the sum is 1
    entropy: Tensor  # float32 [rows, window]
    counted: Tensor
    has_state: Tensor | None = None  # bool [rows, window]; False: no draft begins after this token; None: all may

    @classmethod
    def of(
        cls, ids: Tensor, probs: Tensor, counted: Tensor, vocab_ids: Tensor | None, has_state: Tensor | None = None
    ) -> SparseLaw:
        """Renormalise a law of the target's `ids` over a reduced vocabulary; an id of -1 is no token."""
        places = ids.clamp_min(0)
        if vocab_ids is not None:
            places = _places_in(vocab_ids, places)
            likeliest = places.gather(-1, probs.argmax(-1, keepdim=True))[..., 0]
            counted = counted & (likeliest >= 0)
        probs = probs.masked_fill((ids < 0) | (places < 0), 0.0)
        total = probs.sum(-1, keepdim=True)
        counted = counted & (total[..., 0] > 0)
        probs = probs / total.clamp_min(torch.finfo(probs.dtype).tiny)
        return cls(places.clamp_min(0), probs, torch.special.entr(probs).sum(-1), counted, has_state)

    def divergence(self, draft_logits: Tensor, start: int, roots: Tensor | None = None) -> Tensor:
        rows = rows_from(start, draft_logits, roots)
        draft_logits = draft_logits.float()
        named = draft_logits.gather(-1, self.ids[:, rows]) - draft_logits.logsumexp(-1, keepdim=True)
        divergence = -(self.probs[:, rows] * named).sum(-1) - self.entropy[:, rows]
        counted = self.counted[:, rows]
        if self.has_state is not None:
            counted = counted & self.has_state[:, rows_from(0, draft_logits, roots)]
        return mean_of_counted(divergence, counted)


def rows_from(start: int, draft_logits: Tensor, roots: Tensor | None) -> slice | Tensor:
    """Return the window's rows that draft rows [rows, num_rows, ..] are of: from `start` on, or after the roots."""
    return slice(start, start + draft_logits.shape[1]) if roots is None else roots + start


def mean_of_counted(values: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of the counted values; 0 if there are none."""
    return (values * counted).sum() / counted.sum().clamp_min(1)


def _places_in(vocab_ids: Tensor, ids: Tensor) -> Tensor:
    """Return the place of each id in a reduced vocabulary, which may be in any order; -1: it has none."""
    places = vocab_ids.new_full((1 + int(max(vocab_ids.max(), ids.max())),), -1)
    places[vocab_ids] = torch.arange(len(vocab_ids), device=vocab_ids.device)
    return places[ids]
