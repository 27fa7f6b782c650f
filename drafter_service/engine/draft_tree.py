"""Build deterministic draft trees: candidates by their chance of being reached and right, the best within a budget.

The best-first trees of EAGLE-2 (Li et al. 2024): a node's score is the product of the drafter's probabilities along its
path, so a parent never scores below its children and the best nodes always form a tree. Such trees are verified as
point masses in order; which nodes they hold may therefore depend on anything.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.verifier_service.messages.draft import ROOT, Draft


@dataclass(slots=True, kw_only=True)
class ChosenNodes:
    """Part of a tree, as `Draft` carries it."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    confidences: tuple[float, ...]


@dataclass(slots=True)
class DraftTree:
    """Candidate nodes in the order in which they were added: every parent before its children."""

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)  # of a node, given that its parent is right
    scores: list[float] = field(default_factory=list)  # product of `probs` from the root
    depths: list[int] = field(default_factory=list)  # 0: follows the root

    def __len__(self) -> int:
        return len(self.token_ids)

    def add(self, parent: int, token_id: int, prob: float) -> int:
        """Add a node with probability `prob` in [0, 1] given its parent; return its index."""
        assert ROOT <= parent < len(self), parent
        self.token_ids.append(token_id)
        self.parents.append(parent)
        self.probs.append(prob)
        self.scores.append(prob * (1.0 if parent == ROOT else self.scores[parent]))
        self.depths.append(0 if parent == ROOT else self.depths[parent] + 1)
        return len(self) - 1

    def path(self, index: int) -> list[int]:
        """Return the token ids from the root to a node."""
        tokens: list[int] = []
        while index != ROOT:
            tokens.append(self.token_ids[index])
            index = self.parents[index]
        return tokens[::-1]

    def best(self, max_nodes: int) -> ChosenNodes:
        """Keep the `max_nodes` best nodes, siblings likeliest first: O(n log n)."""
        # equal scores: the older one, so that a parent comes before its children
        kept = heapq.nsmallest(max_nodes, range(len(self)), key=lambda index: (-self.scores[index], index))
        return self.chosen(sorted(kept, key=lambda index: (self.depths[index], -self.scores[index], index)))

    def chosen(self, indices: Sequence[int]) -> ChosenNodes:
        """Return some nodes in the given order, each after its parent."""
        new_index = {ROOT: ROOT} | {index: position for position, index in enumerate(indices)}
        return ChosenNodes(
            token_ids=tuple(self.token_ids[index] for index in indices),
            parents=tuple(new_index[self.parents[index]] for index in indices),
            confidences=tuple(self.probs[index] for index in indices),
        )


def num_named(draft: Draft, text: Sequence[int]) -> int:
    """Count a draft's tokens that a text has at their places, up to the first wrong one; of a tree, on its best path.

    `text` begins at the draft's position.
    """
    right = {ROOT: 0}  # by node whose path is right: the tokens of the path
    for index, (token_id, parent) in enumerate(zip(draft.token_ids, _parents(draft), strict=True)):
        depth = right.get(parent, len(text))
        if depth < len(text) and token_id == text[depth]:
            right[index] = depth + 1
    return max(right.values())


def num_reached(draft: Draft, num_tokens: int) -> int:
    """Count a draft's tokens that a text of `num_tokens` has a token in the place of."""
    if draft.parents is None:
        return min(len(draft.token_ids), num_tokens)
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return sum(depth < num_tokens for depth in depths)


def _parents(draft: Draft) -> Sequence[int]:
    return range(ROOT, len(draft.token_ids) - 1) if draft.parents is None else draft.parents
