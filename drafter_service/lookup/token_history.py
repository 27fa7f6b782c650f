"""Shared by drafters without a model: a session's tokens, and acceptance estimates by kind of guess.

Their drafts are point masses, which are exact however they are chosen: the estimates may learn from outcomes.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from outrider.drafter_service.engine.acceptance import AcceptanceEstimate
from outrider.drafter_service.engine.draft_tree import ChosenNodes, DraftTree
from outrider.verifier_service.messages.draft import ROOT

UNBOUNDED_MODEL_LEN = 1 << 31  # the context of a drafter without a model


@dataclass(slots=True)
class TokenHistory:
    """A drafter's own copy of the committed tokens of one session."""

    token_ids: list[int] = field(default_factory=list)
    _source: Sequence[int] | None = None

    def is_continued_by(self, token_ids: Sequence[int]) -> bool:
        """Return whether an ask's tokens begin with this history: O(1) for the session's own list, which only grows.

        Another list, as after a resync, is compared token by token.
        """
        num_known = len(self.token_ids)
        if len(token_ids) < num_known:
            return False
        if token_ids is self._source:
            return num_known == 0 or token_ids[num_known - 1] == self.token_ids[-1]
        return list(token_ids[:num_known]) == self.token_ids

    def extend_to(self, token_ids: Sequence[int]) -> list[int]:
        """Extend the history to an ask's tokens; return the new ones."""
        new_ids = list(token_ids[len(self.token_ids) :])
        self.token_ids += new_ids
        self._source = token_ids
        return new_ids


@dataclass(slots=True)
class Guesses:
    """The guesses of a draft: each token's kind and parent (parents None: a chain)."""

    token_ids: Sequence[int] = ()
    parents: Sequence[int] | None = None
    kinds: Sequence[Hashable] = ()

    def teach(self, estimate: AcceptanceEstimate, new_ids: Sequence[int]) -> None:
        """Update an estimate from the tokens committed since.

        Only guesses with a right parent and a committed token count, so that a cut draft teaches nothing wrong.
        """
        right_depths = {ROOT: -1}  # depth of each right guess
        num_new = len(new_ids)
        for index, token_id in enumerate(self.token_ids):
            depth = right_depths.get(index - 1 if self.parents is None else self.parents[index], num_new) + 1
            if depth >= num_new:
                if self.parents is None:
                    break
                continue
            is_right = token_id == new_ids[depth]
            if is_right:
                right_depths[index] = depth
            estimate.observe(self.kinds[index], is_accepted=is_right)


@dataclass(slots=True)
class GuessTree:
    """A draft tree under construction from several sources: equal paths are one node."""

    tree: DraftTree = field(default_factory=DraftTree)
    kinds: list[Hashable] = field(default_factory=list)
    _children: dict[tuple[int, int], int] = field(default_factory=dict)
    _taken: dict[int, float] = field(default_factory=dict)  # total probability of a node's children

    def __len__(self) -> int:
        return len(self.kinds)

    def free(self, parent: int) -> float:
        """Return the probability that no child of a node is right."""
        return max(0.0, 1.0 - self._taken.get(parent, 0.0))

    def add(self, parent: int, token_id: int, prob: float, kind: Hashable) -> int:
        """Return a node's child for a token, an existing or a new one."""
        index = self._children.get((parent, token_id))
        if index is None:
            prob = min(prob, self.free(parent))
            index = self._children[parent, token_id] = self.tree.add(parent, token_id, prob)
            self._taken[parent] = self._taken.get(parent, 0.0) + prob
            self.kinds.append(kind)
        return index

    def best(self, max_nodes: int) -> ChosenNodes:
        return self.tree.best(max_nodes)

    def first(self, max_nodes: int) -> ChosenNodes:
        """Keep the first added nodes, in this order."""
        return self.tree.chosen(range(min(len(self), max_nodes)))

    def guesses(self) -> Guesses:
        return Guesses(self.tree.token_ids, self.tree.parents, self.kinds)
