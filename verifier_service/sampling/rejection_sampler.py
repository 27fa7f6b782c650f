"""Rejection sampling: committed tokens have exactly the target's law (Leviathan et al. 2023; Chen et al. 2023).

A draft token is accepted with probability min(1, target_prob / draft_prob); the first one rejected is replaced by a
draw from the residual max(target_probs - draft_probs, 0), and a fully accepted draft earns a bonus token.

Nothing here may look at a drawn token to decide *whether* it is verified: a token outside the target's vocabulary has
target probability 0, so it is rejected and recovered like any other. Cutting it would bias what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft
from outrider.verifier_service.sampling.draft_rows import found_probs
from outrider.verifier_service.sampling.sampler import choose


def verify_by_rejection(target_probs: torch.Tensor, draft: Draft | None, uniform: Callable[[], float]) -> list[int]:
    """Return the committed tokens of one request: accepted ones, then the recovered or the bonus token.

    target_probs float [len(draft) + 1, vocab_size]; `uniform` draws from [0, 1), once per token tried and once for the
    last token. This is the plain reference; `verify_batch_by_rejection` does the same for many requests at once.
    """
    token_ids = () if draft is None else draft.token_ids
    assert target_probs.is_floating_point(), target_probs.dtype
    assert target_probs.shape == (len(token_ids) + 1, target_probs.shape[-1]), (target_probs.shape, len(token_ids))
    draft_rows = [] if draft is None else [draft_law(draft, index) for index in range(len(token_ids))]
    for index, (token_id, draft_row) in enumerate(zip(token_ids, draft_rows, strict=True)):
        target_row = target_probs[index].double()  # [vocab_size]
        target_prob = float(target_row[token_id]) if token_id < len(target_row) else 0.0
        if not uniform() * draft_row[token_id] < target_prob:
            residual = target_row.clone()
            for other_id, draft_prob in draft_row.items():
                if other_id < len(residual):
                    residual[other_id] = max(float(residual[other_id]) - draft_prob, 0.0)
            return [*token_ids[:index], _draw(residual if residual.sum() > 0.0 else target_row, uniform())]
    return [*token_ids, _draw(target_probs[-1].double(), uniform())]


def verify_batch_by_rejection(
    target_probs: torch.Tensor, drafts: Sequence[Draft | None], uniforms: torch.Tensor
) -> list[list[int]]:
    """Verify many requests at once: one list of committed tokens each.

    target_probs float [num_rows, vocab_size] and uniforms float64 [num_rows] hold len(draft) + 1 rows per request, in
    order; a request uses its uniforms from the first on, one per token tried and one for the last token.
    """
    num_draft_tokens = [_num_tokens(draft) for draft in drafts]
    num_rows = sum(num_draft_tokens) + len(drafts)
    assert target_probs.is_floating_point(), target_probs.dtype
    assert target_probs.shape == (num_rows, target_probs.shape[-1]), (target_probs.shape, num_rows)
    assert (uniforms.dtype, uniforms.shape) == (torch.float64, (num_rows,)), (uniforms.dtype, uniforms.shape)
    if not drafts:
        return []
    outcomes = _judge(target_probs, drafts, uniforms.tolist())
    rejected = [_rejected_row(draft, outcome) for draft, outcome in zip(drafts, outcomes, strict=True)]
    uniform_rows = torch.tensor([outcome.uniform_row for outcome in outcomes], device=uniforms.device)
    last = draw_from_rest(
        target_probs, [outcome.row for outcome in outcomes], rejected, uniforms.index_select(0, uniform_rows)
    )
    return [
        [*(() if draft is None else draft.token_ids[: outcome.num_accepted]), token_id]
        for draft, outcome, token_id in zip(drafts, outcomes, last, strict=True)
    ]


def target_probs_of_drafts(target_probs: torch.Tensor, drafts: Sequence[Draft | None]) -> list[float]:
    """Look up the target probability of every token of some chains in one go: [num_rows], 0 outside the vocabulary.

    That of a bonus row means nothing.
    """
    vocab_size = target_probs.shape[1]
    flat = [id_ for draft in drafts for id_ in (*(() if draft is None else draft.token_ids), vocab_size)]
    token_ids = torch.tensor(flat, device=target_probs.device)
    return found_probs(target_probs, torch.arange(len(flat), device=target_probs.device), token_ids).tolist()


def draw_from_rest(
    target_probs: torch.Tensor, rows: Sequence[int], taken: Sequence[Mapping[int, float]], uniforms: torch.Tensor
) -> list[int]:
    """Draw each request's last token from what rejections left of its row of target_probs [num_rows, vocab_size].

    `taken` holds {token id: probability} to subtract, down to 0; ids outside the vocabulary mean nothing, and an empty
    one leaves the target's own law. uniforms float64 [num_requests].
    """
    device, vocab_size = target_probs.device, target_probs.shape[1]
    target_rows = target_probs.index_select(0, torch.tensor(rows, device=device)).double()  # [num_requests, vocab_size]
    entries = [
        (request, token_id, prob)
        for request, row in enumerate(taken)
        for token_id, prob in row.items()
        if token_id < vocab_size
    ]
    residual = target_rows.clone()
    requests = torch.tensor([entry[0] for entry in entries], device=device, dtype=torch.int64)
    token_ids = torch.tensor([entry[1] for entry in entries], device=device, dtype=torch.int64)
    probs = torch.tensor([entry[2] for entry in entries], device=device, dtype=torch.float64)
    residual.index_put_((requests, token_ids), -probs, accumulate=True)
    return choose_from_rest(target_rows, residual, uniforms.to(device)).tolist()


def choose_from_rest(target_rows: torch.Tensor, residual: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from what is left of each row, float64 [num_requests, vocab_size] both; below 0 counts as 0."""
    residual.clamp_(min=0.0)
    # target and draft agree but for rounding: nothing is left to recover from, and the target itself is as good
    weights = torch.where(residual.sum(dim=1, keepdim=True) > 0.0, residual, target_rows)
    return choose(weights, uniforms)


@dataclass(frozen=True, slots=True)
class _Outcome:
    num_accepted: int
    row: int  # of target_probs: where the last token is drawn
    uniform_row: int


def _num_tokens(draft: Draft | None) -> int:
    return 0 if draft is None else len(draft.token_ids)


def draft_law(draft: Draft, index: int) -> dict[int, float]:
    """Return what one token of a chain was drawn from as {token id: probability}."""
    if draft.draft_probs is None:
        return {draft.token_ids[index]: 1.0}
    row = draft.draft_probs[index]
    return {id_: weight / DRAFT_PROB_SCALE for id_, weight in zip(row.token_ids, row.weights, strict=True)}


def drawn_prob(draft: Draft, index: int) -> float:
    """Return how likely one token of a chain was to be drawn."""
    if draft.draft_probs is None:
        return 1.0
    row = draft.draft_probs[index]
    return row.weights[row.token_ids.index(draft.token_ids[index])] / DRAFT_PROB_SCALE


def _draw(weights: torch.Tensor, uniform: float) -> int:
    """Draw from float64 weights [vocab_size], counting only what is positive."""
    ids = weights.nonzero()[:, 0]
    cumulative = weights[ids].cumsum(0)
    rank = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return int(ids[min(rank, len(ids) - 1)])


def _judge(target_probs: torch.Tensor, drafts: Sequence[Draft | None], uniforms: Sequence[float]) -> list[_Outcome]:
    """Find how many tokens of each draft are accepted."""
    drawn = target_probs_of_drafts(target_probs, drafts)
    outcomes, start = [], 0
    for draft in drafts:
        num_tokens = _num_tokens(draft)
        end = start + num_tokens
        accepted = 0 if draft is None else _num_accepted(draft, drawn[start:end], uniforms[start:end])
        is_rejected = accepted < num_tokens
        outcomes.append(_Outcome(accepted, start + accepted, start + accepted + is_rejected))
        start = end + 1
    return outcomes


def _num_accepted(draft: Draft, target_probs: Sequence[float], uniforms: Sequence[float]) -> int:
    for index in range(len(draft.token_ids)):
        if not uniforms[index] * drawn_prob(draft, index) < target_probs[index]:
            return index
    return len(draft.token_ids)


def _rejected_row(draft: Draft | None, outcome: _Outcome) -> dict[int, float]:
    """Return what the token that was rejected was drawn from; nothing where all were accepted."""
    if draft is None or outcome.num_accepted == len(draft.token_ids):
        return {}
    return draft_law(draft, outcome.num_accepted)
