"""Rejection sampling of chains, trees and blocks on a device, with numbers that never leave it.

What a node's children are judged by depends on the node alone, not on how it was reached: the target's law in its row,
the law that they were drawn from, and uniform numbers that are those of its place, since a walk that came there tried
every earlier sibling on its way. So all parents are judged at once, sibling by sibling, whether a walk comes there or
not. A chain is a tree whose parents have one child each. Blocks go by sums over the same laws; see
block_verification.py. The references are `tree_choices`, `verify_by_rejection` and `block_choices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The rows of chains that are judged by blocks, the longest chains first."""

    counts: tuple[int, ...]  # [longest] how many chains have a token at each place: they are the first ones
    tokens: torch.Tensor  # int64 [longest, num_chains] the rows that follow their tokens
    families: torch.Tensor  # int64 [num_block_families] of their parents …
    rows: torch.Tensor  # int64 [num_block_families] … and the rows of those

    @classmethod
    def of(
        cls, drafts: Sequence[Draft | None], starts: Sequence[int], by_blocks: Sequence[bool], families: Families
    ) -> Blocks | None:
        """Return None where nobody's draft is judged by blocks."""
        spans = [
            (len(draft.token_ids), start)
            for draft, start, is_block in zip(drafts, starts, by_blocks, strict=True)
            if is_block and draft is not None
        ]
        spans.sort(reverse=True)
        longest = spans[0][0] if spans else 0
        if longest == 0:
            return None
        tokens = np.zeros((longest, len(spans)), np.int64)
        for column, (length, start) in enumerate(spans):
            tokens[:length, column] = np.arange(start + 1, start + length + 1)
        rows = np.array([row for length, start in spans for row in range(start, start + length)], np.int64)
        sent_tokens, sent_rows = upload([tokens, rows], families.rows.device)
        counts = tuple(sum(length > place for length, _ in spans) for place in range(longest))
        return cls(counts=counts, tokens=sent_tokens, families=families.of_rows[sent_rows], rows=sent_rows)

    def judge(
        self,
        families: Families,
        found: torch.Tensor,
        uniforms: torch.Tensor,
        is_right: torch.Tensor,
        taken: torch.Tensor,
    ) -> None:
        """Write over what `judge_siblings` says of these rows: which prefixes are accepted, what is taken from them."""
        weights, own_found = families.weights[self.families], found[self.families]
        column = families.columns[0, self.families, None]
        is_drawn = torch.zeros_like(weights, dtype=torch.bool).scatter_(1, column, True)
        is_point = weights.sum(dim=1, keepdim=True) == 0
        law = torch.where(is_point, is_drawn.double(), weights.double() / DRAFT_PROB_SCALE)
        next_rows = self.rows + 1
        probs = found.new_zeros(2, len(uniforms))
        probs[0].index_copy_(0, next_rows, own_found.gather(1, column)[:, 0])
        probs[1].index_copy_(0, next_rows, law.gather(1, column)[:, 0])
        kept = found.new_ones(len(uniforms))
        reached = found.new_ones(self.tokens.shape[1])
        for tokens, count in zip(self.tokens.unbind(0), self.counts, strict=True):
            rows = tokens[:count]
            reached = (reached[:count] * probs[0, rows] / probs[1, rows]).clamp(max=1.0)
            kept.index_copy_(0, rows, reached)
        own_kept = kept[self.rows, None]
        residual = (own_kept - torch.minimum(own_kept * own_found, law).sum(dim=1, keepdim=True)).clamp_(min=0.0)
        accepted = kept.index_copy(0, self.rows, _acceptance(own_kept, residual)[:, 0])
        is_right.index_copy_(0, next_rows, uniforms[self.rows] < accepted[next_rows])
        # a law to draw from has any factor: target - draft / kept is as good as kept * target - draft
        inside = families.token_ids[self.families] < families.vocab_size
        taken.index_copy_(0, self.families, (law / own_kept).masked_fill_(~inside, 0.0))


def _acceptance(kept: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    total = residual + 1.0 - kept
    return torch.where(total > 0.0, residual / total, 1.0)
