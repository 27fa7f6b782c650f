"""The target's law after each token of a lesson, as a loss reads it: whole, or of a few tokens per row.

A live teacher gives its whole law. What a service has kept of the target is its likeliest tokens, or the token that it
committed: a law of a few tokens, which never takes the space of a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    """A draft's rows beside the target's, over the tokens that the law names: what a loss is made of."""

    target_probs: Tensor  # float32 [rows, num_rows, num_named]; all that the target has
    entropy: Tensor  # float32 [rows, num_rows], of the target
    draft_logprobs: Tensor  # float32 [rows, num_rows, num_named]
    counted: Tensor  # bool [rows, num_rows]

    def divergence(self) -> Tensor:
        """Return KL(target || draft) of each row: cross-entropy to the target's law minus its entropy."""
        return -(self.target_probs * self.draft_logprobs).sum(-1) - self.entropy

    def shared_mass(self) -> Tensor:
        """Return sum(min(target, draft)) of each row: how likely the exact rule accepts a token of the draft's.

        1 - total variation distance (Leviathan et al., 2023). Of a law of one token, it is the draft's probability of
        that token.
        """
        return torch.minimum(self.target_probs, self.draft_logprobs.exp()).sum(-1)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of the counted rows' values, float32 [rows, num_rows]; 0 if none counts."""
        return (values * self.counted).sum() / self.counted.sum().clamp_min(1)


class TargetLaw(Protocol):
    """The target's law over a drafter's vocabulary."""

    @property
    def counted(self) -> Tensor:
        """bool [rows, window]; False: never drafted, or the likeliest token is not in the vocabulary."""

    def beside(self, draft_logits: Tensor, start: int, roots: Tensor | None = None) -> Comparison:
        """Compare draft_logits [rows, num_rows, draft_vocab_size] with the target's rows.

        These are the rows from `start` on, or `start` after `roots`, int64 [num_rows]. Rows whose likeliest token
        cannot be drafted (Li et al., 2025), and rows of a prompt, do not count.
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

    def beside(self, draft_logits: Tensor, start: int, roots: Tensor | None = None) -> Comparison:
        rows = rows_from(start, draft_logits, roots)
        draft_logprobs = draft_logits.float().log_softmax(-1)
        return Comparison(self.probs[:, rows], self.entropy[:, rows], draft_logprobs, self.counted[:, rows])


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

    def beside(self, draft_logits: Tensor, start: int, roots: Tensor | None = None) -> Comparison:
        rows = rows_from(start, draft_logits, roots)
        draft_logits = draft_logits.float()
        named = draft_logits.gather(-1, self.ids[:, rows]) - draft_logits.logsumexp(-1, keepdim=True)
        counted = self.counted[:, rows]
        if self.has_state is not None:
            counted = counted & self.has_state[:, rows_from(0, draft_logits, roots)]
        return Comparison(self.probs[:, rows], self.entropy[:, rows], named, counted)


def rows_from(start: int, draft_logits: Tensor, roots: Tensor | None) -> slice | Tensor:
    """Return the window's rows that draft rows [rows, num_rows, ..] are of: from `start` on, or after the roots."""
    return slice(start, start + draft_logits.shape[1]) if roots is None else roots + start


def _places_in(vocab_ids: Tensor, ids: Tensor) -> Tensor:
    """Return the place of each id in a reduced vocabulary, which may be in any order; -1: it has none."""
    places = vocab_ids.new_full((1 + int(max(vocab_ids.max(), ids.max())),), -1)
    places[vocab_ids] = torch.arange(len(vocab_ids), device=vocab_ids.device)
    return places[ids]
