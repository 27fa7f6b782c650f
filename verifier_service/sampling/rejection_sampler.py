"""Rejection sampling down chains and trees: committed tokens have exactly the target's law.

A draft token is accepted with probability min(1, target_prob / draft_prob). The first rejected token of a chain is
replaced by a draw from the residual max(target_probs - draft_probs, 0); after a chain without a rejection a bonus token
is drawn from the target's law (Leviathan et al. 2023; Chen et al. 2023). A chain is a tree with one child per node.

The children of a node are tried in order. Each is judged by what is left of the target's law after the siblings before
it were rejected. The first accepted child is walked to; if there is none, the last token is drawn from what is left.

- Sampled siblings were drawn from their parent's row without replacement. So the k-th sibling is judged against the row
  without the k - 1 siblings before it, renormalised (SpecInfer, Miao et al. 2024; RSD-S, Jeon et al. 2024).
- A point mass is a row of one token: it is accepted with its share of what is left, or taken out of it.

How many children a node has may depend on what precedes them and on its row, never on themselves or what follows. Nor
may anything here look at a drawn token to decide *whether* it is verified: a token outside the target's vocabulary has
target probability 0, so it is rejected and recovered like any other. Cutting it would bias what is committed.

All parents are judged at once, whether the walk reaches them or not. That works because a child's judgement depends on
its parent alone: on the target's law in the parent's row, on the law that the children were drawn from, and on uniform
numbers whose places are fixed, since a walk that reaches a child has tried every earlier sibling on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.tree import parents_of, rows_by_parent
from outrider.verifier_service.sampling.draft_rows import found_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """Parents with what their children were drawn from, those with the most children first; the last has none.

    `children`, `columns` and `uniforms` have one row per rank of a sibling: [num_ranks, num_families].
    """

    vocab_size: int
    counts: tuple[int, ...]  # [num_ranks] how many families have a child of this rank: they are the first ones
    rows: torch.Tensor  # int64 [num_families] the parent's
    token_ids: torch.Tensor  # int64 [num_families, width] that the law holds, padded with the vocabulary's size
    weights: torch.Tensor  # int64 [num_families, width] of the law; all 0: the children are point masses
    children: torch.Tensor  # int64 the child's row
    columns: torch.Tensor  # int64 where its token is among `token_ids`
    uniforms: torch.Tensor  # int64 the row whose uniform number judges it
    of_rows: torch.Tensor  # int64 [num_rows] each row's family, as a parent

    @classmethod
    def of(
        cls, drafts: Sequence[Draft | None], starts: Sequence[int], num_rows: int, vocab_size: int, device: torch.device
    ) -> Families:
        """Take in the drafts that are judged by tokens or by blocks, with the rows after their roots."""
        families = sorted(_families(drafts, starts), key=lambda family: -len(family.children))
        width = max((len(family.token_ids) for family in families), default=1)
        num_ranks = len(families[0].children) if families else 0
        shape, ranks = (len(families) + 1, width), (3, num_ranks, len(families) + 1)
        token_ids, weights, by_rank = np.full(shape, vocab_size), np.zeros(shape, np.int64), np.zeros(ranks, np.int64)
        of_rows = np.full(num_rows, len(families))
        for index, family in enumerate(families):
            token_ids[index, : len(family.token_ids)] = family.token_ids
            weights[index, : len(family.weights)] = family.weights
            numbers = (family.children, family.columns, range(family.uniform, family.uniform + len(family.children)))
            for place, own in zip(by_rank, numbers, strict=True):
                place[: len(family.children), index] = own
            of_rows[family.row] = index
        rows = np.array([*(family.row for family in families), 0], np.int64)
        sent = upload([rows, token_ids, weights, *by_rank, of_rows], device)
        counts = tuple(sum(len(family.children) > rank for family in families) for rank in range(num_ranks))
        return cls(**dict(zip(_SENT, sent, strict=True)), counts=counts, vocab_size=vocab_size)

    def found(self, target_probs: torch.Tensor) -> torch.Tensor:
        """Look up what the children's laws hold: float64 [num_families, width], 0 outside the vocabulary."""
        return found_probs(target_probs, self.rows[:, None].expand_as(self.token_ids), self.token_ids)


_SENT = ("rows", "token_ids", "weights", "children", "columns", "uniforms", "of_rows")


@dataclass(slots=True)
class _Family:
    row: int
    uniform: int  # the row of the first child's uniform number
    token_ids: list[int] = field(default_factory=list)
    weights: tuple[int, ...] = ()
    children: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)


def _families(drafts: Sequence[Draft | None], starts: Sequence[int]) -> list[_Family]:
    found: list[_Family] = []
    for draft, start in zip(drafts, starts, strict=True):
        if draft is None:
            continue
        laws = rows_by_parent(draft)
        tried = last_uniforms(draft, start)
        own: dict[int, _Family] = {}
        for index, (token_id, parent) in enumerate(zip(draft.token_ids, parents_of(draft), strict=True)):
            family = own.get(parent)
            if family is None:
                law = laws.get(parent)
                family = own[parent] = _Family(start + parent + 1, 0)
                if law is not None:
                    family.token_ids, family.weights = list(law.token_ids), law.weights
            if token_id not in family.token_ids:  # of a point mass
                family.token_ids.append(token_id)
            family.columns.append(family.token_ids.index(token_id))
            family.children.append(start + index + 1)
        for parent, family in own.items():
            family.uniform = tried[parent + 1] - len(family.children)
        found += own.values()
    return found


def last_uniforms(draft: Draft | None, start: int) -> list[int]:
    """Return the row whose uniform number draws the last token after each row: past those of all tokens tried."""
    parents = parents_of(draft)
    num_children = [0] * (len(parents) + 1)
    used = [start]  # before a row's own children are tried
    for parent in parents:
        num_children[parent + 1] += 1
        used.append(used[parent + 1] + num_children[parent + 1])
    return [first + count for first, count in zip(used, num_children, strict=True)]


def judge_siblings(
    families: Families, found: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say which tokens are taken where their parents are, and what is taken from each parent's row where none is.

    found float64 [num_families, width] of `Families.found`, uniforms float64 [num_rows] -> bool [num_rows] and float64
    [num_families, width].
    """
    rest, weights = found.clone(), families.weights.double()
    taken, total = torch.zeros_like(found), found.new_ones(len(found), 1)
    is_right = torch.zeros_like(uniforms, dtype=torch.bool)
    is_open = is_right.new_ones(len(found))
    for rank, count in enumerate(families.counts):
        column = families.columns[rank, :count, None]
        is_drawn = is_right.new_zeros(count, weights.shape[1]).scatter_(1, column, True)
        remaining = weights[:count].sum(dim=1, keepdim=True)
        law = torch.where(remaining > 0.0, weights[:count] / remaining.clamp(min=1.0), is_drawn.double())
        needed = uniforms[families.uniforms[rank, :count], None] * (law.gather(1, column) * total[:count])
        is_accepted = (needed < rest[:count].gather(1, column))[:, 0] & is_open[:count]
        is_right.index_copy_(0, families.children[rank, :count], is_accepted)
        is_open[:count] &= ~is_accepted
        amounts = torch.minimum(rest[:count], law * total[:count])
        rest[:count] -= amounts
        taken[:count] += amounts
        total[:count] = (total[:count] - amounts.sum(dim=1, keepdim=True)).clamp(min=0.0)
        weights[:count].masked_fill_(is_drawn, 0.0)
    return is_right, taken


def left_over(target_rows: torch.Tensor, token_ids: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Return what is left of each row after rejections: the weights that its last token is drawn with.

    target_rows float64 [num_requests, vocab_size]; token_ids int64 and taken float64, both [num_requests, width].
    """
    residual = target_rows.scatter_add(1, token_ids, -taken).clamp_(min=0.0)
    # if target and draft agree but for rounding, nothing is left to recover from: the target's law is as good
    return torch.where(residual.sum(dim=1, keepdim=True) > 0.0, residual, target_rows)
