from __future__ import annotations

import random

import pytest

from outrider.drafter_service.engine.draft_tree import DraftTree
from outrider.verifier_service.messages.draft import ROOT


def made() -> DraftTree:
    """Tokens 10 (0.6) and 11 (0.3) after the root; 12 (0.9) and 13 (0.05) after 10; 14 (0.9) after 11."""
    tree = DraftTree()
    for parent, token_id, prob in ((ROOT, 10, 0.6), (ROOT, 11, 0.3), (0, 12, 0.9), (0, 13, 0.05), (1, 14, 0.9)):
        tree.add(parent, token_id, prob)
    return tree


def test_scores_depths_and_paths_follow_the_parents():
    tree = made()
    assert len(tree) == 5
    assert tree.scores == pytest.approx([0.6, 0.3, 0.54, 0.03, 0.27])
    assert tree.depths == [0, 0, 1, 1, 1]
    assert (tree.path(ROOT), tree.path(2), tree.path(4)) == ([], [10, 12], [11, 14])


@pytest.mark.parametrize(
    ("max_nodes", "token_ids", "parents", "confidences"),
    [
        (0, (), (), ()),
        (1, (10,), (ROOT,), (0.6,)),
        (2, (10, 12), (ROOT, 0), (0.6, 0.9)),
        (3, (10, 11, 12), (ROOT, ROOT, 0), (0.6, 0.3, 0.9)),
        (4, (10, 11, 12, 14), (ROOT, ROOT, 0, 1), (0.6, 0.3, 0.9, 0.9)),
        (9, (10, 11, 12, 14, 13), (ROOT, ROOT, 0, 1, 0), (0.6, 0.3, 0.9, 0.9, 0.05)),
    ],
)
def test_the_best_nodes_level_by_level_the_likeliest_first(max_nodes, token_ids, parents, confidences):
    best = made().best(max_nodes)
    assert (best.token_ids, best.parents, best.confidences) == (token_ids, parents, confidences)


def test_of_equal_scores_the_older_node_stays_so_that_parents_do():
    tree = DraftTree()
    for parent in (ROOT, 0, 1):
        tree.add(parent, 7, 1.0)
    assert tree.best(2).parents == (ROOT, 0)
    tree = DraftTree()
    for parent, token_id in ((ROOT, 1), (ROOT, 2), (1, 3), (0, 4)):
        tree.add(parent, token_id, 0.0)
    assert tree.best(3).token_ids == (1, 2, 3)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_nodes_always_form_a_tree_and_none_is_better_than_they(seed: int):
    rng = random.Random(seed)
    tree = DraftTree()
    for index in range(40):
        tree.add(rng.randint(ROOT, index - 1), index, rng.choice((0.0, 0.25, 0.5, 1.0)))
    for max_nodes in (1, 7, 39, 60):
        best = tree.best(max_nodes)
        assert len(best.token_ids) == len(best.parents) == len(best.confidences) == min(max_nodes, 40)
        assert all(parent < index for index, parent in enumerate(best.parents))
        kept = [tree.scores[token_id] for token_id in best.token_ids]
        left = [tree.scores[token_id] for token_id in set(range(40)) - set(best.token_ids)]
        assert not left or max(left) <= min(kept)
        for token_id, parent in zip(best.token_ids, best.parents, strict=True):
            assert tree.parents[token_id] == (ROOT if parent == ROOT else best.token_ids[parent])


def test_a_parent_must_be_there():
    with pytest.raises(AssertionError):
        made().add(5, 1, 0.5)
    with pytest.raises(AssertionError):
        made().add(-2, 1, 0.5)
