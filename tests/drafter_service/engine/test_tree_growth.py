"""Which nodes a draft grows, and that nothing but shape, rows and earlier levels decides it where tokens are drawn."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafter_service.engine.draft_sampler import Children
from outrider.drafter_service.engine.draft_tree import DraftTree
from outrider.drafter_service.engine.tree_growth import (
    BestFirstGrowth,
    DrawnGrowth,
    Growth,
    fixed_shape,
    nodes_to_compute,
    stem_length,
)
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, SparseRow


def masses(*pairs: tuple[int, float]) -> Children:
    return Children(token_ids=tuple(token for token, _ in pairs), probs=tuple(prob for _, prob in pairs))


def drawn(*token_ids: int, row: tuple[int, ...] = (1, 2)) -> Children:
    weights = (DRAFT_PROB_SCALE - (len(row) - 1), *[1] * (len(row) - 1))
    return Children(token_ids=token_ids, probs=(0.5,) * len(token_ids), row=SparseRow(token_ids=row, weights=weights))


def grow_with(growth: Growth, law: dict[tuple[int, ...], Children]) -> None:
    """Grow to the end, each node's children looked up by its path."""
    while growth.frontier:
        growth.grow([law[tuple(growth.tree.path(node))] for node in growth.frontier])


def test_the_beam_limits_how_many_get_children() -> None:
    growth = BestFirstGrowth([], depth=8, max_nodes=16, branching=2)
    growth.grow([masses((1, 0.5), (2, 0.5))])
    growth.grow([masses((3, 0.5), (4, 0.5))] * 2)
    assert len(growth.frontier) == 2, "16 nodes on 8 levels"


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), st.lists(st.integers(0, 9), max_size=8), st.randoms())
def test_best_first_keeps_within_depth_and_nodes(depth: int, max_nodes: int, branching: int, forced, random) -> None:
    growth = BestFirstGrowth(forced, depth=depth, max_nodes=max_nodes, branching=branching)
    num_levels = len(growth.tree)
    while growth.frontier:
        assert growth.num_children == branching
        assert len(nodes_to_compute(growth.tree, growth.frontier, 0)) <= max_nodes
        growth.grow([masses(*((token, random.random()) for token in range(6))) for _ in growth.frontier])
        num_levels += 1
    chosen = growth.chosen()
    assert num_levels <= depth
    assert max(growth.tree.depths, default=-1) < depth
    assert len(chosen.token_ids) <= max_nodes
    forced = forced[: min(depth, max_nodes)]
    assert list(chosen.token_ids[: len(forced)]) == forced
    assert chosen.parents[: len(forced)] == tuple(range(-1, len(forced) - 1))
    assert all(chosen.parents.count(parent) <= branching for parent in chosen.parents)


def test_best_first_is_what_the_whole_tree_would_give() -> None:
    """Without a beam's limit the pruned search finds the best nodes of the full tree."""
    probs = {token: 0.5 / (token + 1) for token in range(3)}
    growth = BestFirstGrowth([], depth=3, max_nodes=9, branching=3)
    while growth.frontier:
        growth.grow([masses(*probs.items())] * len(growth.frontier))
    paths = [path for depth in (1, 2, 3) for path in itertools.product(range(3), repeat=depth)]
    scores = dict.fromkeys(paths, 1.0)
    for path in paths:
        for token in path:
            scores[path] *= probs[token]
    best = sorted(scores.values(), reverse=True)[:9]
    chosen = growth.chosen()
    assert sorted(_scores(chosen.parents, chosen.confidences), reverse=True) == pytest.approx(best)


def _scores(parents, probs) -> list[float]:
    found: list[float] = []
    for parent, prob in zip(parents, probs, strict=True):
        found.append(prob * (1.0 if parent == ROOT else found[parent]))
    return found


def test_shapes_by_hand() -> None:
    # chances: 0.6, 0.36, 0.216, then the root's second child 0.15, then the fourth level 0.1296
    assert fixed_shape(4, 5, 2) == {ROOT: (0, 3), 0: (1,), 1: (2,), 2: (4,), 3: (), 4: ()}
    assert fixed_shape(2, 3, 1) == {ROOT: (0,), 0: (1,), 1: ()}, "a chain, of the depth asked for"
    assert fixed_shape(0, 5, 2) == fixed_shape(3, 0, 2) == {ROOT: ()}


@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
def test_shapes_use_every_node_they_may(depth: int, max_nodes: int, branching: int) -> None:
    shape = fixed_shape(depth, max_nodes, branching)
    assert max(map(len, shape.values())) <= branching
    possible = sum(branching**level for level in range(1, depth + 1))
    assert len(shape) - 1 == min(max_nodes, possible)


def test_every_drawn_token_is_kept_with_its_row() -> None:
    growth = DrawnGrowth([], depth=3, max_nodes=5, branching=2, has_rows=True)
    assert growth.num_children == 2
    grow_with(
        growth,
        {
            (): drawn(2, 1),
            (2,): drawn(7, 8, row=(7, 8)),
            (1,): drawn(5, row=(5,)),
            (2, 7): drawn(9, row=(9, 3)),
        },
    )
    chosen = growth.chosen()
    # 0.6, 0.36, 0.216, 0.15 (second), 0.09 (its child or the first one's second)
    assert chosen.token_ids[:2] == (2, 1)
    assert chosen.parents[:2] == (ROOT, ROOT)
    with_children = list(dict.fromkeys(chosen.parents))
    assert len(growth.rows()) == len(with_children)
    for parent, row in zip(with_children, growth.rows(), strict=True):
        children = {token for token, of in zip(chosen.token_ids, chosen.parents, strict=True) if of == parent}
        assert children <= set(row.token_ids)
    assert len(chosen.token_ids) == 5


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_what_was_drawn_does_not_decide_how_many_children_a_place_has(order: tuple[int, int]) -> None:
    growth = DrawnGrowth([], depth=2, max_nodes=5, branching=2, has_rows=True)
    growth.grow([drawn(*order)])
    growth.grow([drawn(3, 4, row=(3, 4))] * len(growth.frontier))
    assert growth.chosen().parents == (ROOT, ROOT, 0, 0, 1)


def test_a_row_with_too_few_tokens_leaves_places_empty() -> None:
    growth = DrawnGrowth([], depth=2, max_nodes=5, branching=2, has_rows=True)
    growth.grow([drawn(6, row=(6,))])
    growth.grow([drawn(3, 4, row=(3, 4))])
    assert growth.chosen().parents == (ROOT, 0, 0)
    assert len(growth.rows()) == 2


def test_surplus_children_are_left_out() -> None:
    """The sampler is asked for as many as the neediest node of a level wants."""
    growth = DrawnGrowth([], depth=2, max_nodes=2, branching=2, has_rows=True)
    growth.grow([drawn(2, 1)])
    growth.grow([drawn(2, 1)])
    assert growth.chosen().token_ids == (2, 2)


def test_stem_and_nodes_to_compute_by_hand() -> None:
    tree = DraftTree()
    assert stem_length(tree) == 0
    for parent in (ROOT, 0):
        tree.add(parent, 0, 1.0)
    assert stem_length(tree) == 2
    assert nodes_to_compute(tree, [1], 2) == []
    for parent in (1, 1, 2, 3, 3):
        tree.add(parent, 0, 1.0)  # 2, 3 under 1; 4 under 2; 5, 6 under 3
    assert stem_length(tree) == 2
    assert nodes_to_compute(tree, [5, 6], 2) == [3, 5, 6]
    assert nodes_to_compute(tree, [4, 6], 2) == [2, 3, 4, 6]
    forked = DraftTree()
    for parent in (ROOT, ROOT, 0):
        forked.add(parent, 0, 1.0)
    assert stem_length(forked) == 0
