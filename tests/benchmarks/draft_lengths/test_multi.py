"""Two drafters' drafts in one tree."""

from __future__ import annotations

import pytest

from benchmarks.draft_lengths.multi import merged, per_verification, ratio
from outrider.lab.replay.traces import count_accepted
from outrider.verifier_service.messages.draft import ROOT, Draft


def draft(token_ids: tuple[int, ...], parents: tuple[int, ...] | None = None) -> Draft:
    return Draft(request_id="", round_id=0, position=0, token_ids=token_ids, parents=parents)


def test_what_both_name_is_one_node():
    tree = merged(draft((1, 2, 3)), 3, draft((1, 4, 2, 9), (ROOT, 0, 0, 2)), 5)
    assert tree.token_ids == (1, 2, 3, 4, 9)
    assert tree.parents == (ROOT, 0, 1, 0, 1)


def test_the_first_has_its_share_and_the_rest_is_the_others():
    tree = merged(draft((1, 2, 3, 4)), 2, draft((7, 8, 9)), 4)
    assert tree.token_ids == (1, 2, 7, 8)
    assert merged(draft((1, 2)), 0, draft((7, 8, 9)), 4).token_ids == (7, 8, 9)


@pytest.mark.parametrize("coming", [[1, 2, 3, 5], [7, 8, 9], [7, 2], [4]])
def test_a_merged_tree_accepts_what_the_better_of_both_does(coming: list[int]):
    first, second = draft((1, 2, 3)), draft((7, 8, 2), (ROOT, 0, 0))
    best = max(count_accepted(one, coming) for one in (first, second))
    assert count_accepted(merged(first, 3, second, 6), coming) == best


def test_ratios():
    assert per_verification([(4, 2), (2, 1)]) == 2.0
    assert ratio([(4, 2)] * 3, [(2, 2)] * 3) == "2.000 (2.000 … 2.000)"
