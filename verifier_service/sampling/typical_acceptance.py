"""Typical acceptance: a draft token is right when the target finds it likely enough (Medusa, Cai et al. 2024).

A token is taken where its target probability exceeds min(epsilon, delta * exp(-entropy of the target's law)): the less
sure the target is, the less it asks. Of a tree the longest path of such tokens is committed, and the last token is
drawn from the target's law as it is. This changes the law of the output, so it is opt-in and marked in the response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.messages.tree import longest_path, parents_of
from outrider.verifier_service.sampling.draft_rows import found_probs


def typical_path(target_probs: torch.Tensor, draft: Draft | None, sampling: SamplingParams) -> tuple[int, ...]:
    """Return the indices of the accepted tokens of one draft.

    target_probs float [len(draft) + 1, vocab_size]: row 0 follows the root, row i + 1 follows token i. This is the
    plain reference; `typical_paths` does the same for many requests at once.
    """
    if draft is None:
        return ()
    parents = parents_of(draft)
    is_right = []
    for token_id, parent in zip(draft.token_ids, parents, strict=True):
        row = target_probs[parent + 1].tolist()
        entropy = -sum(prob * math.log(prob) for prob in row if prob > 0.0)
        threshold = min(sampling.typical_epsilon, sampling.typical_delta * math.exp(-entropy))
        is_right.append(token_id < len(row) and row[token_id] > threshold)
    return longest_path(parents, is_right)


def typical_paths(
    target_probs: torch.Tensor, drafts: Sequence[Draft | None], samplings: Sequence[SamplingParams]
) -> list[tuple[int, ...]]:
    """Return the indices of the accepted tokens of many drafts.

    target_probs float [num_rows, vocab_size] holds len(draft) + 1 rows per request, in order.
    """
    num_rows = sum(len(parents_of(draft)) + 1 for draft in drafts)
    assert target_probs.is_floating_point(), target_probs.dtype
    assert target_probs.shape == (num_rows, target_probs.shape[-1]), (target_probs.shape, num_rows)
    rows: list[int] = []  # of target_probs: one per draft token, that of its parent
    token_ids: list[int] = []
    start = 0
    for draft in drafts:
        parents = parents_of(draft)
        rows += [start + parent + 1 for parent in parents]
        token_ids += () if draft is None else draft.token_ids
        start += len(parents) + 1
    device = target_probs.device
    limits = torch.tensor(_limits(drafts, samplings), dtype=torch.float64, device=device).reshape(-1, 2)
    row_index, wanted = torch.tensor([rows, token_ids], dtype=torch.int64, device=device)
    judged = iter(are_typical(target_probs, row_index, wanted, limits).tolist())
    all_parents = [parents_of(draft) for draft in drafts]
    return [longest_path(parents, [next(judged) for _ in parents]) for parents in all_parents]


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


def _limits(drafts: Sequence[Draft | None], samplings: Sequence[SamplingParams]) -> list[tuple[float, float]]:
    """Return (epsilon, delta) of every draft token."""
    return [
        (sampling.typical_epsilon, sampling.typical_delta)
        for draft, sampling in zip(drafts, samplings, strict=True)
        for _ in parents_of(draft)
    ]
