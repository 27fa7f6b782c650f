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

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.tree import parents_of, rows_by_parent
from outrider.verifier_service.sampling.draft_rows import found_probs
from outrider.verifier_service.sampling.unread import UnreadTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """Parents with their children and the laws that these were drawn from.

    A child's rank is its place among its siblings. Families with more children come first, so that those with a child
    of some rank are the first ones; the last family has none. It stands for rows without children.
    """

    vocab_size: int
    counts: tuple[int, ...]  # [num_ranks] how many families have a child of this rank
    rows: torch.Tensor  # int64 [num_families] the parent's row
    token_ids: torch.Tensor  # int64 [num_families, width] the law's tokens, padded with the vocabulary's size
    laws: torch.Tensor  # float64 [num_ranks, num_families, width] what a child was drawn from; point masses: 1 and 0
    children: torch.Tensor  # int64 [num_ranks, num_families] the child's row
    columns: torch.Tensor  # int64 [num_ranks, num_families] the place of the child's token in `token_ids`
    uniforms: torch.Tensor  # int64 [num_ranks, num_families] the row whose uniform number judges the child
    of_rows: torch.Tensor  # int64 [num_rows] the family whose parent a row is

    @classmethod
    def of(
        cls, drafts: Sequence[Draft | None], starts: Sequence[int], num_rows: int, vocab_size: int, device: torch.device
    ) -> Families | None:
        """`drafts` are judged by tokens or by blocks, `starts` are the rows after their roots; None: no drafts."""
        families = sorted(_families(drafts, starts), key=lambda family: -len(family.children))
        if not families:
            return None
        families.append(_Family(0, 0))
        rows = np.array([family.row for family in families], np.int64)
        of_rows = np.full(num_rows, len(families) - 1)
        of_rows[rows[:-1]] = np.arange(len(families) - 1)
        children = _by_place([family.children for family in families], 0)
        columns = _by_place([family.columns for family in families], 0)
        parts = {
            "rows": rows,
            "token_ids": _by_place([family.token_ids for family in families], vocab_size).T,
            "laws": _laws(_by_place([family.weights for family in families], 0).T, columns),
            "children": children,
            "columns": columns,
            "uniforms": np.array([family.uniform for family in families]) + np.arange(len(children))[:, None],
            "of_rows": of_rows,
        }
        counts = tuple(sum(len(family.children) > rank for family in families) for rank in range(len(children)))
        sent = upload(list(parts.values()), device)
        return cls(**dict(zip(parts, sent, strict=True)), counts=counts, vocab_size=vocab_size)

    def filled(self, unread: UnreadTokens) -> Families:
        """Return the families of chains with the tokens and laws that their placeholders stand for."""
        token_ids, laws, columns = unread.laws(self.token_ids[:, 0], self.vocab_size)
        return replace(self, token_ids=token_ids, laws=laws[None], columns=columns[None])

    def found(self, target_probs: torch.Tensor) -> torch.Tensor:
        """Look up the target probabilities of `token_ids`: float64 [num_families, width], 0 outside the vocabulary."""
        return found_probs(target_probs, self.rows[:, None].expand_as(self.token_ids), self.token_ids)


@dataclass(slots=True)
class _Family:
    row: int
    uniform: int  # the row of the first child's uniform number
    token_ids: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)  # one per token
    children: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)


def _families(drafts: Sequence[Draft | None], starts: Sequence[int]) -> list[_Family]:
    found: list[_Family] = []
    for draft, start in zip(drafts, starts, strict=True):
        if draft is None:
            continue
        if draft.parents is None:  # each token is its parent's only child
            laws_of_chain = draft.draft_probs or itertools.repeat(None)
            for row, token_id, law in zip(itertools.count(start), draft.token_ids, laws_of_chain, strict=False):
                ids, weights = ([token_id], [0]) if law is None else ([*law.token_ids], [*law.weights])
                found.append(_Family(row, row, ids, weights, [row + 1], [ids.index(token_id)]))
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
                    family.token_ids, family.weights = list(law.token_ids), list(law.weights)
            if token_id not in family.token_ids:  # of a point mass
                family.token_ids.append(token_id)
                family.weights.append(0)
            family.columns.append(family.token_ids.index(token_id))
            family.children.append(start + index + 1)
        for parent, family in own.items():
            family.uniform = tried[parent + 1] - len(family.children)
        found += own.values()
    return found


def _by_place(lists: Sequence[Sequence[int]], filler: int) -> np.ndarray:
    """Return the first numbers of all lists, then the second ones, and so on: int64 [longest, num_lists]."""
    return np.array(list(itertools.zip_longest(*lists, fillvalue=filler)), np.int64).reshape(-1, len(lists))


def _laws(weights: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return the law that each child was drawn from: float64 [num_ranks, num_families, width].

    weights int64 [num_families, width] of a parent's row, all 0: point masses; columns int64 [num_ranks, num_families].
    """
    laws = np.empty((len(columns), *weights.shape))
    for law, column in zip(laws, columns, strict=True):
        is_drawn = np.arange(weights.shape[1]) == column[:, None]
        total = weights.sum(axis=1, keepdims=True)
        law[...] = np.where(total > 0, weights / np.maximum(total, 1), is_drawn)
        weights = np.where(is_drawn, 0, weights)
    return laws


def last_uniforms(draft: Draft | None, start: int) -> list[int]:
    """Return, for each row, the row whose uniform number draws the last token if the path ends there.

    It is the first that no tried token has used: trying a row's n children uses the numbers of n rows.
    """
    if draft is None:
        return [start]
    if draft.parents is None:
        stop = start + len(draft.token_ids)
        return [*range(start + 1, stop + 1), stop]
    parents = draft.parents
    num_children = [0] * (len(parents) + 1)
    used = [start]  # before a row's own children are tried
    for parent in parents:
        num_children[parent + 1] += 1
        used.append(used[parent + 1] + num_children[parent + 1])
    return [first + count for first, count in zip(used, num_children, strict=True)]


def judge_siblings(
    families: Families, found: torch.Tensor, uniforms: torch.Tensor, is_right: torch.Tensor
) -> torch.Tensor:
    """Judge all children: set `is_right` of those that are taken if their parent is.

    found float64 [num_families, width] of `Families.found`, uniforms float64 and is_right bool, both [num_rows].
    Returns what rejections took out of each parent's law if no child is taken: float64 [num_families, width].
    """
    rest, taken, total = found.clone(), torch.zeros_like(found), found.new_ones(len(found), 1)
    is_open = is_right.new_ones(len(found))  # no child was taken so far
    for rank, count in enumerate(families.counts):
        column = families.columns[rank, :count, None]
        law = families.laws[rank, :count] * total[:count]
        needed = uniforms[families.uniforms[rank, :count], None] * law.gather(1, column)
        is_accepted = (needed < rest[:count].gather(1, column))[:, 0] & is_open[:count]
        is_right.index_copy_(0, families.children[rank, :count], is_accepted)
        is_open[:count] &= ~is_accepted
        amounts = torch.minimum(rest[:count], law)
        rest[:count] -= amounts
        taken[:count] += amounts
        total[:count] = (total[:count] - amounts.sum(dim=1, keepdim=True)).clamp(min=0.0)
    return taken


def left_over(target_rows: torch.Tensor, token_ids: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Return what is left of each row after rejections: the weights that its last token is drawn with.

    target_rows float64 [num_requests, vocab_size]; token_ids int64 and taken float64, both [num_requests, width].
    """
    residual = target_rows.scatter_add(1, token_ids, -taken).clamp_(min=0.0)
    # if target and draft agree but for rounding, nothing is left to recover from: the target's law is as good
    return torch.where(residual.sum(dim=1, keepdim=True) > 0.0, residual, target_rows)
