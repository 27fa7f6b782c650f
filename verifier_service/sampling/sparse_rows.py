"""Laws as sparse integer rows, which travel between verifiers and drafters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, SparseRow
from outrider.verifier_service.sampling.sampler import top_candidates


def quantised_rows(probs: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the `top_n` likeliest tokens and round to integer weights that sum to DRAFT_PROB_SCALE.

    probs float32 [num_rows, vocab_size] -> token ids and weights, both int64 [num_rows, <= top_n], likeliest first;
    what rounds to 0 is left in with weight 0. Largest remainders are rounded up.
    """
    values, ids = top_candidates(probs, min(top_n, probs.shape[1]))
    shares = values.double()
    shares *= DRAFT_PROB_SCALE / shares.sum(dim=1, keepdim=True)
    weights = shares.floor()
    by_remainder = (shares - weights).argsort(dim=1, descending=True, stable=True)
    missing = DRAFT_PROB_SCALE - weights.sum(dim=1, keepdim=True)  # fewer than there are columns
    rounded_up = (torch.arange(ids.shape[1], device=ids.device) < missing).to(weights.dtype).expand_as(weights)
    return ids, weights.scatter_add_(1, by_remainder, rounded_up).to(torch.int64)


def sparse_row(token_ids: Sequence[int], weights: Sequence[int]) -> SparseRow:
    """Return a row of quantised weights without those that are 0."""
    kept = [(id_, weight) for id_, weight in zip(token_ids, weights, strict=True) if weight]
    return SparseRow(token_ids=tuple(id_ for id_, _ in kept), weights=tuple(weight for _, weight in kept))


def likeliest_rows(logits: torch.Tensor, top_n: int) -> list[SparseRow]:
    """Return the `top_n` likeliest tokens of each row's law at temperature 1; logits float32 [num_rows, vocab_size]."""
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    ids, weights = torch.stack(quantised_rows(logits.softmax(dim=1), top_n)).tolist()  # one read for both
    return [sparse_row(*row) for row in zip(ids, weights, strict=True)]
