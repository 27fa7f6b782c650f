"""Block verification of chains: the same law as token by token, never fewer tokens on average (Sun et al. 2024).

Rejection sampling judges each token alone and forgets that those before it were liked far better by the target than by
the drafter. Here a prefix is kept with the probability

    kept[0] = 1,   kept[i] = min(kept[i - 1] * target_prob[i] / draft_prob[i], 1)

which is at least the product of the tokens' own. Prefixes are judged from the shortest to the whole chain, and the
longest one accepted counts (arXiv 2403.10444, algorithm 2). With the residual mass after i tokens,

    residual[i] = sum over the vocabulary of max(kept[i] * target_probs[i + 1] - draft_probs[i + 1], 0)

the prefix of i tokens is accepted with residual[i] / (residual[i] + 1 - kept[i]), the whole chain with its `kept`. The
last token is drawn from that residual law, or from the target's after the whole chain. As with rejection sampling, a
chain's length may depend on its tokens and rows so far. Point masses gain nothing and lose nothing.

Chains only, by what they were *asked* for. A sampled tree that happens to look like a chain must not be judged by
blocks: this rule leans on the laws of tokens further down, so choosing it by a shape that they decided is inexact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.sampling.rejection_sampler import (
    draft_law,
    draw_from_rest,
    drawn_prob,
    target_probs_of_drafts,
)
from outrider.verifier_service.sampling.tree_sampler import RandomChoices, decide


def verify_block(target_probs: torch.Tensor, draft: Draft | None, uniform: Callable[[], float]) -> VerifiedTokens:
    """Verify one chain, with one number of `uniform` per draft token and one for the last token.

    target_probs float [len(draft) + 1, vocab_size]. This is the plain reference; `verify_blocks` does the same for many
    requests at once.
    """
    return decide(block_choices(target_probs, draft), uniform)


def block_choices(target_probs: torch.Tensor, draft: Draft | None) -> RandomChoices:
    """Verify one chain as a row of random choices: whoever makes them may draw them or enumerate them all."""
    token_ids = _chain(draft)
    assert target_probs.is_floating_point(), target_probs.dtype
    assert target_probs.shape == (len(token_ids) + 1, target_probs.shape[-1]), (target_probs.shape, len(token_ids))
    target_rows: list[list[float]] = target_probs.tolist()
    draft_rows = [] if draft is None else [draft_law(draft, index) for index in range(len(token_ids))]
    kept = 1.0
    residuals = [_residual(1.0, target_rows[0], draft_rows[0])] if token_ids else []
    num_accepted = 0
    for index, token_id in enumerate(token_ids):
        target_prob = target_rows[index][token_id] if token_id < len(target_rows[index]) else 0.0
        kept = min(kept * target_prob / draft_rows[index][token_id], 1.0)
        accepted = kept
        if index + 1 < len(token_ids):
            residuals.append(_residual(kept, target_rows[index + 1], draft_rows[index + 1]))
            accepted = _acceptance(kept, sum(residuals[-1]))
        if (yield [accepted, 1.0 - accepted]) == 0:
            num_accepted = index + 1
    last_row = target_rows[num_accepted]
    residual = residuals[num_accepted] if num_accepted < len(token_ids) else last_row
    last_token_id = yield residual if any(residual) else last_row
    return VerifiedTokens.along(draft, range(num_accepted), last_token_id)


def verify_blocks(
    target_probs: torch.Tensor, drafts: Sequence[Draft | None], uniforms: torch.Tensor
) -> list[VerifiedTokens]:
    """Verify many chains at once.

    target_probs float [num_rows, vocab_size] and uniforms float64 [num_rows] hold len(draft) + 1 rows per request, in
    order: one per draft token and one for the last token. Only the supports of the draft's rows are looked at, for the
    residual's sum is kept[i] - sum of min(kept[i] * target_probs, draft_probs) over them.
    """
    num_rows = sum(len(_chain(draft)) + 1 for draft in drafts)
    assert target_probs.is_floating_point(), target_probs.dtype
    assert target_probs.shape == (num_rows, target_probs.shape[-1]), (target_probs.shape, num_rows)
    assert (uniforms.dtype, uniforms.shape) == (torch.float64, (num_rows,)), (uniforms.dtype, uniforms.shape)
    if not drafts:
        return []
    kept = _kept(drafts, target_probs_of_drafts(target_probs, drafts))
    acceptances = _acceptances(target_probs, drafts, kept)
    numbers = uniforms.tolist()
    rows: list[int] = []  # of target_probs: where the last tokens are drawn
    taken: list[dict[int, float]] = []
    stops: list[int] = []
    start = 0
    for draft in drafts:
        stop = start + len(_chain(draft))
        row = next((row for row in range(stop, start, -1) if numbers[row - 1] < acceptances[row]), start)
        # a law to draw from has any factor: target - draft / kept is as good as kept * target - draft
        law = {} if draft is None or row == stop else draft_law(draft, row - start)
        taken.append({id_: prob / kept[row] for id_, prob in law.items()})
        rows.append(row)
        stops.append(stop)
        start = stop + 1
    last = draw_from_rest(target_probs, rows, taken, uniforms[stops])
    return [
        VerifiedTokens.along(draft, range(row - stop + len(_chain(draft))), token_id)
        for draft, row, stop, token_id in zip(drafts, rows, stops, last, strict=True)
    ]


def _chain(draft: Draft | None) -> tuple[int, ...]:
    if draft is None:
        return ()
    assert draft.parents is None, "a tree is not verified by blocks"
    return draft.token_ids


def _kept(drafts: Sequence[Draft | None], drawn: Sequence[float]) -> list[float]:
    """Return `kept` of every prefix, that of no tokens first: [num_rows].

    drawn [num_rows]: the target probability of every draft token, and one more number per request.
    """
    kept: list[float] = []
    start = 0
    for draft in drafts:
        kept.append(1.0)
        for index in range(len(_chain(draft))):
            assert draft is not None
            kept.append(min(kept[-1] * drawn[start + index] / drawn_prob(draft, index), 1.0))
        start = len(kept)
    return kept


def _acceptances(target_probs: torch.Tensor, drafts: Sequence[Draft | None], kept: Sequence[float]) -> list[float]:
    """Return the probability of every prefix, given that no longer one is accepted: [num_rows]."""
    rows: list[int] = []
    token_ids: list[int] = []
    weights: list[int] = []
    is_whole = [True] * len(kept)
    start = 0
    for draft in drafts:
        for index, token_id in enumerate(_chain(draft)):
            assert draft is not None
            row = None if draft.draft_probs is None else draft.draft_probs[index]
            support: Sequence[int] = (token_id,) if row is None else row.token_ids
            rows += [start + index] * len(support)
            token_ids += support
            weights += (DRAFT_PROB_SCALE,) if row is None else row.weights
            is_whole[start + index] = False
        start += len(_chain(draft)) + 1
    device, vocab_size = target_probs.device, target_probs.shape[1]
    entry_rows = torch.tensor(rows, dtype=torch.int64, device=device)  # [num_entries]
    wanted = torch.tensor(token_ids, dtype=torch.int64, device=device)
    found = target_probs[entry_rows, wanted.clamp(max=vocab_size - 1)].double().masked_fill_(wanted >= vocab_size, 0.0)
    of_rows = torch.tensor(kept, dtype=torch.float64, device=device)  # [num_rows]
    draft_probs = torch.tensor(weights, dtype=torch.float64, device=device) / DRAFT_PROB_SCALE
    overlaps = torch.minimum(of_rows[entry_rows] * found, draft_probs)  # [num_entries]
    overlap = torch.zeros_like(of_rows).index_add_(0, entry_rows, overlaps)
    residuals = (of_rows - overlap).clamp_(min=0.0).tolist()
    return [
        prob if whole else _acceptance(prob, residual)
        for prob, residual, whole in zip(kept, residuals, is_whole, strict=True)
    ]


def _acceptance(kept: float, residual: float) -> float:
    """Return the probability of a prefix that is kept with `kept` and leaves a residual mass."""
    # both laws agree and the prefix is kept for certain: so are all that follow, whatever is said here
    return residual / (residual + 1.0 - kept) if residual + 1.0 - kept > 0.0 else 1.0


def _residual(kept: float, target_row: Sequence[float], draft_row: Mapping[int, float]) -> list[float]:
    return [max(kept * prob - draft_row.get(id_, 0.0), 0.0) for id_, prob in enumerate(target_row)]
