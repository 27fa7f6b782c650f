"""Trees as lists of parents."""

from __future__ import annotations

from outrider.verifier_service.messages.draft import ROOT, Draft, SparseRow
from outrider.verifier_service.messages.tree import (
    VerifiedTokens,
    ancestors,
    chain_parents,
    depths,
    is_chain,
    parents_of,
    rows_by_parent,
)

#   root -> 0 -> 2 -> 5
#        -> 1 -> 3
#             -> 4
PARENTS = (ROOT, ROOT, 0, 1, 1, 2)


def draft_of(
    *token_ids: int, parents: tuple[int, ...] | None = None, rows: tuple[SparseRow, ...] | None = None
) -> Draft:
    return Draft(request_id="r", round_id=1, position=3, token_ids=token_ids, parents=parents, draft_probs=rows)


def test_a_chain_is_a_tree() -> None:
    assert chain_parents(0) == ()
    assert chain_parents(3) == (ROOT, 0, 1)
    assert is_chain([])
    assert is_chain([ROOT, 0, 1])
    assert not is_chain([ROOT, ROOT])
    assert not is_chain(PARENTS)
    assert parents_of(None) == parents_of(draft_of()) == ()
    assert parents_of(draft_of(7, 8)) == (ROOT, 0)
    assert parents_of(draft_of(7, 8, parents=(ROOT, ROOT))) == (ROOT, ROOT)


def test_depths_and_ancestors_count_from_the_root() -> None:
    assert depths(PARENTS) == [0, 0, 1, 1, 1, 2]
    assert depths(chain_parents(4)) == [0, 1, 2, 3]
    assert [ancestors(PARENTS, index) for index in range(6)] == [[], [], [0], [1], [1], [0, 2]]


def test_rows_belong_to_parents_in_the_order_of_first_children() -> None:
    rows = tuple(SparseRow(token_ids=(id_,), weights=(65536,)) for id_ in range(4))
    tree = draft_of(*range(6), parents=PARENTS, rows=rows)
    assert rows_by_parent(tree) == {ROOT: rows[0], 0: rows[1], 1: rows[2], 2: rows[3]}
    depth_first = draft_of(*range(4), parents=(ROOT, 0, 1, ROOT), rows=rows[:3])
    assert rows_by_parent(depth_first) == {ROOT: rows[0], 0: rows[1], 1: rows[2]}
    assert rows_by_parent(draft_of(5, 6, rows=rows[:2])) == {ROOT: rows[0], 0: rows[1]}
    assert rows_by_parent(draft_of(5, 6)) == {}


def test_what_is_committed_lies_along_the_path() -> None:
    tree = draft_of(10, 11, 12, 13, 14, 15, parents=PARENTS)
    assert VerifiedTokens.along(tree, [1, 4], 9) == VerifiedTokens([11, 14, 9], (1, 4))
    assert VerifiedTokens.along(tree, [], 9) == VerifiedTokens.along(None, (), 9) == VerifiedTokens([9], ())
