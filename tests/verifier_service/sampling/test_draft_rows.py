"""Where paths end: the references walk down a draft, `DraftRows` judges all its rows at once."""

from __future__ import annotations

import pytest
import torch

from exactness.references import longest_path, matching_path
from outrider.verifier_service.messages.draft import ROOT, Draft
from outrider.verifier_service.messages.tree import ancestors
from outrider.verifier_service.sampling.draft_rows import DraftRows

#   root -> 0 -> 2 -> 5
#        -> 1 -> 3
#             -> 4
PARENTS = (ROOT, ROOT, 0, 1, 1, 2)
TOKENS = (10, 11, 12, 13, 14, 15)
CPU = torch.device("cpu")


def path_of(is_right: torch.Tensor, rows: DraftRows) -> tuple[int, ...]:
    """Return the path of the second of three requests, the others of which have no draft."""
    first, end, last = rows.ends(is_right).tolist()
    assert (first, last) == (0, len(TOKENS) + 2)
    return () if end == 1 else (*ancestors(PARENTS, end - 2), end - 2)


def rows_of_three() -> DraftRows:
    draft = Draft(request_id="r", round_id=1, position=3, token_ids=TOKENS, parents=PARENTS)
    return DraftRows.of([None, draft, None], CPU)


@pytest.mark.parametrize(
    ("choices", "path"),
    [
        # after the root, then after each node: node 0 and 1 are tokens 10 and 11, and so on
        ([10, 12, 0, 15, 0, 0, 0], (0, 2, 5)),
        ([11, 12, 14, 15, 0, 0, 0], (1, 4)),
        ([11, 12, 12, 15, 0, 0, 0], (1,)),  # 12 is a token of the other branch
        ([12, 12, 14, 15, 0, 0, 0], ()),
    ],
)
def test_a_walk_follows_the_targets_own_choices(choices: list[int], path: tuple[int, ...]) -> None:
    assert matching_path(TOKENS, PARENTS, choices) == path
    rows = rows_of_three()
    assert path_of(rows.are_chosen(torch.tensor([9, *choices, 9])), rows) == path


@pytest.mark.parametrize(
    ("is_right", "path"),
    [
        ([1, 1, 1, 1, 1, 1], (0, 2, 5)),
        ([0, 1, 1, 1, 1, 1], (1, 3)),  # what follows a wrong token does not count; the first of two
        ([0, 1, 1, 0, 1, 1], (1, 4)),
        ([0, 1, 1, 0, 0, 1], (1,)),
        ([0, 0, 1, 1, 1, 1], ()),
        ([1, 1, 0, 1, 0, 1], (1, 3)),
    ],
)
def test_the_longest_path_is_right_from_the_root_on(is_right: list[int], path: tuple[int, ...]) -> None:
    assert longest_path(PARENTS, [bool(right) for right in is_right]) == path
    rows = rows_of_three()
    assert path_of(torch.tensor([0, 0, *is_right, 0]).bool(), rows) == path


def test_paths_of_requests_without_drafts_end_at_their_roots() -> None:
    assert longest_path([], []) == ()
    empty = Draft(request_id="r", round_id=1, position=3, token_ids=())
    rows = DraftRows.of([None, empty, None], CPU)
    assert rows.ends(torch.zeros(3, dtype=torch.bool)).tolist() == [0, 1, 2]
