"""Make drafts of rows that do not see each other: one law for each position, whatever stands at those before it.

A chain drawn from such rows has exactly these rows as its law. In a tree all nodes of one depth share their row: its
best nodes are the best part of the rows' Cartesian product, as point masses; a drawn tree draws anew for every node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.drafter_service.engine.draft_sampler import Children, launch_children, read_children
from outrider.drafter_service.engine.engine import Ask, DraftResult
from outrider.drafter_service.engine.product_tree import best_of_product
from outrider.drafter_service.engine.tree_growth import (
    DEFAULT_TREES,
    DrawnGrowth,
    TreeConfig,
    answer_of,
    chain_growth,
    draws_rows,
    result_of,
)

BRANCHING = 10  # the most children that a node of a best tree has: the product is deep in its likeliest tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDrafts:
    """Drafts in the first `vocab_size` ids; rows on the wire have `top_n` tokens."""

    rng: torch.Generator
    vocab_size: int
    top_n: int = 32
    trees: TreeConfig = DEFAULT_TREES

    def make(self, asks: Sequence[Ask], rows: Sequence[torch.Tensor]) -> list[DraftResult]:
        """Answer each ask by its forced tokens, then guesses from its rows, float32 logits [num_guesses, vocab_size].

        An ask without rows gets its forced tokens alone.
        """
        kinds: tuple[Callable[[Sequence[Ask], Sequence[torch.Tensor]], list[DraftResult]], ...]
        kinds = (self._chains, self._best_trees, self._drawn_trees)
        results: dict[int, DraftResult] = {}
        for kind in kinds:
            chosen = [index for index, ask in enumerate(asks) if self._kind(ask) == kind]
            if chosen:
                made = kind([asks[index] for index in chosen], [rows[index] for index in chosen])
                results |= zip(chosen, made, strict=True)
        return [results[index] for index in range(len(asks))]

    def _kind(self, ask: Ask) -> Callable[[Sequence[Ask], Sequence[torch.Tensor]], list[DraftResult]]:
        if not ask.max_nodes:
            return self._chains
        return self._drawn_trees if draws_rows(ask) and self.trees.method == "sampled" else self._best_trees

    def _chains(self, asks: Sequence[Ask], rows: Sequence[torch.Tensor]) -> list[DraftResult]:
        results: list[DraftResult] = []
        for ask, levels in zip(asks, self._levels(asks, rows, num_children=1, sampled=True), strict=True):
            chain = chain_growth(ask, len(ask.forced_ids) + len(levels))
            for children in levels:
                chain.grow([children])
            results.append(answer_of(ask, chain))
        return results

    def _best_trees(self, asks: Sequence[Ask], rows: Sequence[torch.Tensor]) -> list[DraftResult]:
        levels = self._levels(asks, rows, num_children=BRANCHING, sampled=False)
        return [
            result_of(ask, best_of_product(own, ask.forced_ids, max_nodes=ask.max_nodes))
            for ask, own in zip(asks, levels, strict=True)
        ]

    def _drawn_trees(self, asks: Sequence[Ask], rows: Sequence[torch.Tensor]) -> list[DraftResult]:
        """Grow trees level by level, all of them at once."""
        growths = [
            DrawnGrowth(
                ask.forced_ids,
                depth=len(ask.forced_ids) + len(own),
                max_nodes=ask.max_nodes,
                branching=self.trees.branching,
                has_rows=True,
            )
            for ask, own in zip(asks, rows, strict=True)
        ]
        level = 0
        while growing := [index for index, growth in enumerate(growths) if growth.frontier]:
            places = [(index, level) for index in growing for _ in growths[index].frontier]
            num_children = max(growths[index].num_children for index in growing)
            children = iter(self._choose(asks, rows, places, num_children=num_children, sampled=True))
            for index in growing:
                growths[index].grow([next(children) for _ in growths[index].frontier])
            level += 1
        return [answer_of(ask, growth) for ask, growth in zip(asks, growths, strict=True)]

    def _levels(
        self, asks: Sequence[Ask], rows: Sequence[torch.Tensor], *, num_children: int, sampled: bool
    ) -> list[list[Children]]:
        """Return the candidates at each depth after the forced tokens, by ask."""
        places = [(index, level) for index, own in enumerate(rows) for level in range(len(own))]
        levels: list[list[Children]] = [[] for _ in asks]
        chosen = self._choose(asks, rows, places, num_children=num_children, sampled=sampled) if places else []
        for (index, _), children in zip(places, chosen, strict=True):
            levels[index].append(children)
        return levels

    def _choose(
        self,
        asks: Sequence[Ask],
        rows: Sequence[torch.Tensor],
        places: Sequence[tuple[int, int]],  # ask and level
        *,
        num_children: int,
        sampled: bool,
    ) -> list[Children]:
        found = launch_children(
            torch.stack([rows[index][level] for index, level in places]),
            [asks[index].sampling for index, _ in places],
            [len(asks[index].token_ids) + len(asks[index].forced_ids) + level for index, level in places],
            self.rng,
            vocab_size=self.vocab_size,
            num_children=num_children,
            top_n=self.top_n,
            sampled=sampled,
        )
        return read_children(found)
