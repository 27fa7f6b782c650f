"""The acceptance rules, token by token, as their papers have them: slow, and what the one path is compared with.

A request takes one uniform number from [0, 1) per token that is tried, and one for its last token. `target_probs` is
float [len(draft) + 1, vocab_size] everywhere: row 0 follows the root, row i + 1 follows token i.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

import torch

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams, VerificationMode
from outrider.verifier_service.messages.tree import VerifiedTokens, ancestors, parents_of, rows_by_parent
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from outrider.verifier_service.sampling.entries import VerificationEntry
from tiny.verified import apply_edits
from tiny.verified import target_probs as laws_of

RandomChoices = Generator[Sequence[float], int, VerifiedTokens]  # yields weights, is sent the index chosen by them


def verify_step(
    logits: torch.Tensor, entries: Sequence[VerificationEntry], rng: torch.Generator
) -> list[VerifiedTokens]:
    """Verify a step, one entry after the other; `begin` does the same with the same `rng`.

    logits float32 [num_rows, vocab_size]. A rejection-sampled entry has one number of `rng` per row.
    """
    committed, start = [], 0
    for entry in entries:
        rows = logits[start : start + entry.num_rows]
        rows = rows if entry.edits is None else apply_edits(rows, [(0, entry.edits)])
        committed.append(_verify_entry(rows, entry, rng))
        start += entry.num_rows
    return committed


def _verify_entry(logits: torch.Tensor, entry: VerificationEntry, rng: torch.Generator) -> VerifiedTokens:
    draft, sampling = entry.draft, entry.sampling
    if sampling.mode is VerificationMode.GREEDY:
        return along_choices(draft, logits.argmax(dim=1).tolist())
    probs = laws_of(logits, [sampling] * entry.num_rows)
    if sampling.mode is VerificationMode.COUPLED:
        noise = gumbel_noise(
            sampling.seed, sampling.choice_index, torch.tensor(entry.positions), logits.shape[1], "cpu"
        )
        choices = coupled_choice(probs, noise).tolist()
        if sampling.acceptance is not AcceptanceRule.TYPICAL:
            return along_choices(draft, choices)
        path = typical_path(probs, draft, sampling)
        return VerifiedTokens.along(draft, path, choices[path[-1] + 1 if path else 0])
    return verify_sampled(probs, entry, iter(torch.rand(entry.num_rows, dtype=torch.float64, generator=rng).tolist()))


def verify_sampled(target_probs: torch.Tensor, entry: VerificationEntry, numbers: Iterator[float]) -> VerifiedTokens:
    """Verify one unseeded request by its rule."""
    draft, uniform = entry.draft, numbers.__next__
    if entry.rule is AcceptanceRule.TYPICAL:
        path = typical_path(target_probs, draft, entry.sampling)
        last_row = target_probs[path[-1] + 1 if path else 0]
        return VerifiedTokens.along(draft, path, _pick(last_row.tolist(), uniform()))
    if entry.rule is AcceptanceRule.BLOCK:
        return verify_block(target_probs, draft, uniform)
    if draft is not None and draft.parents is not None:
        return verify_tree(target_probs, draft, uniform)
    token_ids = verify_by_rejection(target_probs, draft, uniform)
    return VerifiedTokens(token_ids, tuple(range(len(token_ids) - 1)))


# --- greedy and coupled ---


def along_choices(draft: Draft | None, choices: Sequence[int]) -> VerifiedTokens:
    """Walk down while a draft token is the target's own choice, and commit the choice that no token equals."""
    path = matching_path(() if draft is None else draft.token_ids, parents_of(draft), choices)
    return VerifiedTokens.along(draft, path, choices[path[-1] + 1 if path else 0])


def matching_path(token_ids: Sequence[int], parents: Sequence[int], choices: Sequence[int]) -> tuple[int, ...]:
    """Walk down while a child is the target's own choice: choices[0] after the root, choices[i + 1] after token i."""
    path: list[int] = []
    node = ROOT
    for index, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if parent == node and token_id == choices[node + 1]:
            path.append(index)
            node = index
    return tuple(path)


# --- rejection sampling ---


def verify_by_rejection(target_probs: torch.Tensor, draft: Draft | None, uniform: Callable[[], float]) -> list[int]:
    """Return the committed tokens of a chain: accepted ones, then the recovered or the bonus token."""
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


def draft_law(draft: Draft, index: int) -> dict[int, float]:
    """Return what one token of a chain was drawn from as {token id: probability}."""
    if draft.draft_probs is None:
        return {draft.token_ids[index]: 1.0}
    row = draft.draft_probs[index]
    return {id_: weight / DRAFT_PROB_SCALE for id_, weight in zip(row.token_ids, row.weights, strict=True)}


def _draw(weights: torch.Tensor, uniform: float) -> int:
    """Draw from float64 weights [vocab_size], counting only what is positive."""
    ids = weights.nonzero()[:, 0]
    cumulative = weights[ids].cumsum(0)
    rank = int(torch.searchsorted(cumulative, uniform * cumulative[-1], right=True))
    return int(ids[min(rank, len(ids) - 1)])


# --- trees ---


def verify_tree(target_probs: torch.Tensor, draft: Draft | None, uniform: Callable[[], float]) -> VerifiedTokens:
    """Verify one draft by rejection, chain or tree."""
    return decide(tree_choices(target_probs, draft), uniform)


def decide(choices: RandomChoices, uniform: Callable[[], float]) -> VerifiedTokens:
    """Make every choice by one number from [0, 1)."""
    try:
        weights = next(choices)
        while True:
            weights = choices.send(_pick(weights, uniform()))
    except StopIteration as end:
        verified: VerifiedTokens = end.value
        return verified


def tree_choices(target_probs: torch.Tensor, draft: Draft | None) -> RandomChoices:
    """Verify one draft as a row of random choices: whoever makes them may draw them or enumerate them all."""
    parents = parents_of(draft)
    assert target_probs.is_floating_point(), target_probs.dtype
    assert target_probs.shape == (len(parents) + 1, target_probs.shape[-1]), (target_probs.shape, len(parents))
    path: list[int] = []
    node = ROOT
    while True:
        own = target_probs[node + 1].tolist()  # [vocab_size]
        rest = own
        row = {} if draft is None else _row_of(draft, node)
        for child in [index for index, parent in enumerate(parents) if parent == node]:
            assert draft is not None
            token_id = draft.token_ids[child]
            draft_law = row or {token_id: 1.0}
            target_prob = rest[token_id] if token_id < len(rest) else 0.0
            accepted = min(target_prob / draft_law[token_id], 1.0)
            if (yield [accepted, 1.0 - accepted]) == 0:
                path.append(child)
                break
            rest = _normalised([max(prob - draft_law.get(id_, 0.0), 0.0) for id_, prob in enumerate(rest)])
            row = _without(row, token_id)
        else:
            last_token_id = yield rest if any(rest) else own
            return VerifiedTokens.along(draft, path, last_token_id)
        node = child


def _pick(weights: Sequence[float], uniform: float) -> int:
    threshold, reached, last = uniform * sum(weights), 0.0, 0
    for index, weight in enumerate(weights):
        reached += weight
        if weight > 0.0:
            last = index
            if reached > threshold:
                break
    return last


def _row_of(draft: Draft, parent: int) -> dict[int, float]:
    row = rows_by_parent(draft).get(parent)
    if row is None:
        return {}
    return {id_: weight / DRAFT_PROB_SCALE for id_, weight in zip(row.token_ids, row.weights, strict=True)}


def _without(row: Mapping[int, float], token_id: int) -> dict[int, float]:
    kept = {id_: prob for id_, prob in row.items() if id_ != token_id}
    total = sum(kept.values())
    return {id_: prob / total for id_, prob in kept.items()}


def _normalised(law: Sequence[float]) -> list[float]:
    total = sum(law)
    return [prob / total for prob in law] if total > 0.0 else list(law)


# --- blocks ---


def verify_block(target_probs: torch.Tensor, draft: Draft | None, uniform: Callable[[], float]) -> VerifiedTokens:
    """Verify one chain by blocks."""
    return decide(block_choices(target_probs, draft), uniform)


def block_choices(target_probs: torch.Tensor, draft: Draft | None) -> RandomChoices:
    """Verify one chain by blocks, as a row of random choices."""
    assert draft is None or draft.parents is None, "a tree is not verified by blocks"
    token_ids = () if draft is None else draft.token_ids
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


def _acceptance(kept: float, residual: float) -> float:
    """Return the probability of a prefix that is kept with `kept` and leaves a residual mass."""
    # both laws agree and the prefix is kept for certain: so are all that follow, whatever is said here
    return residual / (residual + 1.0 - kept) if residual + 1.0 - kept > 0.0 else 1.0


def _residual(kept: float, target_row: Sequence[float], draft_row: Mapping[int, float]) -> list[float]:
    return [max(kept * prob - draft_row.get(id_, 0.0), 0.0) for id_, prob in enumerate(target_row)]


# --- typical acceptance ---


def typical_path(target_probs: torch.Tensor, draft: Draft | None, sampling: SamplingParams) -> tuple[int, ...]:
    """Return the indices of the accepted tokens of one draft."""
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


def longest_path(parents: Sequence[int], is_right: Sequence[bool]) -> tuple[int, ...]:
    """Return the longest path from the root over tokens that are all right, the first of several."""
    lengths: list[int] = []  # of the path that ends in a token; 0: it is broken
    for parent, right in zip(parents, is_right, strict=True):
        above = 0 if parent == ROOT else lengths[parent]
        lengths.append(above + 1 if right and (parent == ROOT or above) else 0)
    if not any(lengths):
        return ()
    end = lengths.index(max(lengths))
    return (*ancestors(parents, end), end)
