"""Drafts from rows that do not see each other's guesses: one row for each depth, all of them there at once.

Every node of a depth has the same law. So a chain drawn from the rows has exactly these as its law, a drawn tree draws
each node's children anew from the row of its depth, and the best tree is part of the product of the rows' best tokens.
Where a row's law is known only with the token before it (`Edges`), drafts grow level by level, as a model's do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from outrider.drafter_service.engine.draft_sampler import Children, launch_children, read_children
from outrider.drafter_service.engine.draft_tree import ChosenNodes, DraftTree
from outrider.drafter_service.engine.drafter import Ask
from outrider.drafter_service.engine.product_tree import best_of_product
from outrider.drafter_service.engine.tree_growth import (
    DEFAULT_TREES,
    BestFirstGrowth,
    ChainGrowth,
    DraftRules,
    DrawnGrowth,
    Growing,
    Growth,
    TreeConfig,
    chain_growth,
    draws_rows,
)
from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.draft import ROOT, SparseRow

# of rows [num_rows, width] and the tokens before them, int64 [num_rows]: float32 logits [num_rows, vocab_size], and the
# chance that what is drawn from each is accepted [num_rows], None: the law says it
Edges = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
BRANCHING = 10  # the most children that a node of a best tree has: the product is deep in its likeliest tokens


class ProductGrowth:
    """The best nodes of the tree in which every node of a depth has the same children; one node stands for all."""

    is_drawn = is_chain = False
    chain_left = 0

    def __init__(self, forced_ids: Sequence[int], *, num_guesses: int, max_nodes: int, branching: int) -> None:
        self.tree = DraftTree()
        self.num_children = branching
        self.frontier = [ROOT] if num_guesses else []
        self._forced_ids, self._num_guesses, self._max_nodes = forced_ids, num_guesses, max_nodes
        self._levels: list[Children] = []

    def grow(self, found: Sequence[Children]) -> None:
        self._levels += found
        if len(self._levels) == self._num_guesses:
            self.frontier = []

    def chosen(self) -> ChosenNodes:
        return best_of_product(self._levels, self._forced_ids, max_nodes=self._max_nodes)

    def rows(self) -> tuple[SparseRow, ...]:
        return ()


def start_rows(
    ask: Ask,
    num_guesses: int,
    *,
    trees: TreeConfig = DEFAULT_TREES,
    branching: int = BRANCHING,
    has_edges: bool = False,
) -> Growth:
    """Start a draft of the forced tokens and of `num_guesses` rows after them; `branching` is that of best trees."""
    forced_ids = ask.forced_ids[: ask.length]
    depth = len(forced_ids) + num_guesses
    if not ask.max_nodes:
        return chain_growth(ask, depth)
    if has_edges and (not draws_rows(ask) or trees.method != "sampled"):
        return BestFirstGrowth(forced_ids, depth=depth, max_nodes=ask.max_nodes, branching=trees.branching)
    if not draws_rows(ask) or trees.method != "sampled":
        return ProductGrowth(forced_ids, num_guesses=num_guesses, max_nodes=ask.max_nodes, branching=branching)
    shape = {"depth": depth, "max_nodes": ask.max_nodes, "branching": trees.branching}
    return DrawnGrowth(forced_ids, has_rows=True, **shape)


class _Place(NamedTuple):
    """A node whose children are wanted."""

    draft: Growing
    row: torch.Tensor  # float32 [vocab_size]
    level: int  # of the row, after the forced tokens


def _choose(places: Sequence[_Place], rules: DraftRules) -> list[Children]:
    found = launch_children(
        torch.stack([place.row for place in places]),
        [place.draft.ask.sampling for place in places],
        [place.draft.first_position + len(place.draft.ask.forced_ids) + place.level for place in places],
        rules.rng,
        vocab_size=rules.vocab_size,
        num_children=max(place.draft.growth.num_children for place in places),
        top_n=rules.top_n,
        sampled=places[0].draft.growth.is_drawn,
    )
    return read_children(found)


def _grow_along(places: Sequence[tuple[_Place, int]], rules: DraftRules, edges: Edges) -> list[Children]:
    """Return the children of nodes, each given with its token."""
    rows = torch.stack([place.row for place, _ in places])
    laws, chances = edges(rows, upload_rows([token_id for _, token_id in places], rows.device))
    found = _choose([place._replace(row=law) for (place, _), law in zip(places, laws, strict=True)], rules)
    if chances is None:
        return found
    return [
        children._replace(probs=(chance,)) if place.draft.growth.is_chain else children
        for (place, _), children, chance in zip(places, found, chances.tolist(), strict=True)
    ]


def _places_of(draft: Growing, own: torch.Tensor) -> list[tuple[_Place, int]]:
    """Return the nodes whose children are wanted, each with its token."""
    tree, num_forced = draft.growth.tree, len(draft.ask.forced_ids)
    levels = [(tree.depths[node] + 1 if node != ROOT else 0) - num_forced for node in draft.growth.frontier]
    before = [tree.token_ids[node] if node != ROOT else draft.ask.token_ids[-1] for node in draft.growth.frontier]
    places = [_Place(draft, own[level], level) for level in levels]
    return list(zip(places, before, strict=True))


def _grow_with_edges(drafts: Sequence[tuple[Growing, torch.Tensor]], rules: DraftRules, edges: Edges) -> None:
    for is_drawn in (True, False):
        kept = [(draft, own) for draft, own in drafts if draft.growth.is_drawn is is_drawn]
        while kept := [(draft, own) for draft, own in kept if draft.growth.frontier]:
            wanted = [_places_of(draft, own) for draft, own in kept]
            found = iter(_grow_along([place for places in wanted for place in places], rules, edges))
            for (draft, _), places in zip(kept, wanted, strict=True):
                draft.growth.grow([next(found) for _ in places])


def grow_rows(
    drafts: Sequence[Growing], rows: Sequence[torch.Tensor], rules: DraftRules, edges: Edges | None = None
) -> None:
    """Grow drafts to their end: rows are float32 logits [num_guesses, model_vocab_size] of each, or what edges read."""
    if edges is not None:
        return _grow_with_edges(list(zip(drafts, rows, strict=True)), rules, edges)

    def choose(places: Sequence[_Place]) -> list[Children]:
        return _choose(places, rules)

    for kind in (ChainGrowth, ProductGrowth):  # one node for each row: all rows at once
        places = [
            _Place(draft, row, level)
            for draft, own in zip(drafts, rows, strict=True)
            if isinstance(draft.growth, kind)
            for level, row in enumerate(own)
        ]
        for place, children in zip(places, choose(places) if places else (), strict=True):
            place.draft.growth.grow([children])
    trees = [(draft, own) for draft, own in zip(drafts, rows, strict=True) if isinstance(draft.growth, DrawnGrowth)]
    level = 0
    while trees := [(draft, own) for draft, own in trees if draft.growth.frontier]:
        found = iter(choose([_Place(draft, own[level], level) for draft, own in trees for _ in draft.growth.frontier]))
        for draft, _ in trees:
            draft.growth.grow([next(found) for _ in draft.growth.frontier])
        level += 1
