"""Rejection sampling down a draft tree: committed tokens have exactly the target's law.

The children of a node are tried in order. Each is judged by what is left of the target's law after the siblings before
it were rejected; the first one accepted is walked to, and where none is, the last token is drawn from what is left.

- Sampled siblings were drawn from their parent's row without replacement, so the k-th one is judged against the row
  without the k - 1 before it, renormalised (SpecInfer, Miao et al. 2024; RSD-S, Jeon et al. 2024).
- A point mass is a row of one token: it is accepted with its share of what is left, or taken out of it.

How many children a node has may depend on what precedes them and on its row, never on themselves or what follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft
from outrider.verifier_service.messages.tree import VerifiedTokens, parents_of, rows_by_parent
from outrider.verifier_service.sampling.rejection_sampler import draw_from_rest

RandomChoices = Generator[Sequence[float], int, VerifiedTokens]  # yields weights, is sent the index chosen by them


def verify_tree(target_probs: torch.Tensor, draft: Draft | None, uniform: Callable[[], float]) -> VerifiedTokens:
    """Verify one draft, chain or tree, with one number of `uniform` per token tried and one for the last token.

    target_probs float [len(draft) + 1, vocab_size]: row 0 follows the root, row i + 1 follows token i. This is the
    plain reference; `verify_trees` does the same for many requests at once.
    """
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


def verify_trees(
    target_probs: torch.Tensor, drafts: Sequence[Draft | None], uniforms: torch.Tensor
) -> list[VerifiedTokens]:
    """Verify many requests at once.

    target_probs float [num_rows, vocab_size] and uniforms float64 [num_rows] hold len(draft) + 1 rows per request, in
    order: after the root, then after each token. A request uses its uniforms from the first on, one per token tried
    and one for the last token. A chain commits what `verify_batch_by_rejection` commits, bit for bit.
    """
    num_rows = sum(len(parents_of(draft)) + 1 for draft in drafts)
    assert target_probs.is_floating_point(), target_probs.dtype
    assert target_probs.shape == (num_rows, target_probs.shape[-1]), (target_probs.shape, num_rows)
    assert (uniforms.dtype, uniforms.shape) == (torch.float64, (num_rows,)), (uniforms.dtype, uniforms.shape)
    if not drafts:
        return []
    numbers = uniforms.tolist()
    walks: list[_Walk] = []
    rows: list[int] = []  # of target_probs: where the last tokens are drawn
    uniform_rows: list[int] = []
    start = 0
    for draft, found in zip(drafts, _target_probs_in_support(target_probs, drafts), strict=True):
        stop = start + len(parents_of(draft)) + 1
        walk = _Walk() if draft is None else _walk(draft, found, numbers[start:stop])
        walks.append(walk)
        rows.append(start + (walk.path[-1] if walk.path else ROOT) + 1)
        uniform_rows.append(start + walk.num_tried)
        start = stop
    last = draw_from_rest(target_probs, rows, [walk.taken for walk in walks], uniforms[uniform_rows])
    return [
        VerifiedTokens.along(draft, walk.path, token_id)
        for draft, walk, token_id in zip(drafts, walks, last, strict=True)
    ]


@dataclass(slots=True)
class _Walk:
    """How far down a tree one request came."""

    path: list[int] = field(default_factory=list)
    num_tried: int = 0
    taken: Mapping[int, float] = field(default_factory=dict)  # {token id: probability} that rejections took at its end


@dataclass(slots=True)
class _Rest:
    """What rejections leave of a node's target law, which is only looked at where the draft's law has support.

    Never renormalised: `total` is what the law sums to, so that the tokens elsewhere keep their probabilities.
    """

    target_probs: dict[int, float]
    weights: dict[int, int]  # of the row that siblings are drawn from, without those drawn before; empty: point masses
    total: float = 1.0
    taken: dict[int, float] = field(default_factory=dict)

    def accepts(self, token_id: int, uniform: float) -> bool:
        """Judge one child; after a rejection what it takes is gone."""
        draft_law = {token_id: 1.0}
        if self.weights:
            remaining = sum(self.weights.values())
            draft_law = {id_: weight / remaining for id_, weight in self.weights.items()}
        if uniform * (draft_law[token_id] * self.total) < self.target_probs[token_id]:
            return True
        total = self.total
        for id_, draft_prob in draft_law.items():
            amount = min(self.target_probs[id_], draft_prob * total)
            self.target_probs[id_] -= amount
            self.taken[id_] = self.taken.get(id_, 0.0) + amount
            self.total -= amount
        self.total = max(self.total, 0.0)  # below zero, a token of target probability 0 would be accepted
        self.weights.pop(token_id, None)
        return False


def _walk(draft: Draft, supports: Mapping[int, _Support], uniforms: Sequence[float]) -> _Walk:
    rows = rows_by_parent(draft)
    walk = _Walk()
    node, rest = ROOT, None
    for index, (token_id, parent) in enumerate(zip(draft.token_ids, parents_of(draft), strict=True)):
        if parent != node:
            continue
        if rest is None:
            row = rows.get(node)
            weights = {} if row is None else dict(zip(row.token_ids, row.weights, strict=True))
            rest = _Rest(dict(zip(*supports[node], strict=True)), weights)
        is_accepted = rest.accepts(token_id, uniforms[walk.num_tried])
        walk.num_tried += 1
        if is_accepted:
            walk.path.append(index)
            node, rest = index, None
    if rest is not None:
        walk.taken = rest.taken
    return walk


_Support = tuple[Sequence[int], Sequence[float]]  # the tokens that a node's children's law holds; their target_probs


def _target_probs_in_support(target_probs: torch.Tensor, drafts: Sequence[Draft | None]) -> list[dict[int, _Support]]:
    """Look up, in one go, what every parent's children's law holds: 0 outside the vocabulary."""
    laws = [_supports(draft) for draft in drafts]
    rows: list[int] = []
    token_ids: list[int] = []
    start = 0
    for draft, law in zip(drafts, laws, strict=True):
        for parent, ids in law.items():
            rows += [start + parent + 1] * len(ids)
            token_ids += ids
        start += len(parents_of(draft)) + 1
    device, vocab_size = target_probs.device, target_probs.shape[1]
    wanted = torch.tensor(token_ids, dtype=torch.int64, device=device)
    found = target_probs[torch.tensor(rows, dtype=torch.int64, device=device), wanted.clamp(max=vocab_size - 1)]
    probs = iter(found.double().masked_fill_(wanted >= vocab_size, 0.0).tolist())
    return [{parent: (ids, list(itertools.islice(probs, len(ids)))) for parent, ids in law.items()} for law in laws]


def _supports(draft: Draft | None) -> dict[int, Sequence[int]]:
    """Return the token ids that each parent's children's law holds."""
    if draft is None:
        return {}
    if draft.draft_probs is not None:
        return {parent: row.token_ids for parent, row in rows_by_parent(draft).items()}
    children: dict[int, list[int]] = {}
    for token_id, parent in zip(draft.token_ids, parents_of(draft), strict=True):
        children.setdefault(parent, []).append(token_id)
    return dict(children)


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
