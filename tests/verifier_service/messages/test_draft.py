"""A draft is verified only if it is what was asked for and its draft_probs could have produced it."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.verifier_service.messages.draft import (
    DRAFT_PROB_SCALE,
    ROOT,
    Draft,
    DraftSampling,
    SparseRow,
)
from outrider.verifier_service.messages.draft_checks import check_draft

VOCAB_SIZE = 100
HALF = DRAFT_PROB_SCALE // 2


def row(*token_ids: int, weights: tuple[int, ...] | None = None) -> SparseRow:
    """Equal weights unless told otherwise."""
    share = DRAFT_PROB_SCALE // max(len(token_ids), 1)
    return SparseRow(token_ids=token_ids, weights=(share,) * len(token_ids) if weights is None else weights)


def problem_of(*token_ids: int, rows: tuple[SparseRow, ...] | None = None, max_length: int = 4) -> str | None:
    draft = Draft(request_id="r", round_id=1, position=5, token_ids=token_ids, draft_probs=rows)
    return check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=max_length)


def test_good_drafts_have_no_problem() -> None:
    assert problem_of() is None
    assert problem_of(rows=()) is None
    assert problem_of(0, VOCAB_SIZE - 1, 3, 3) is None
    assert problem_of(7, rows=(row(7),)) is None
    assert problem_of(7, 8, rows=(row(6, 7), row(8, 9, weights=(1, DRAFT_PROB_SCALE - 1)))) is None


def test_a_draft_may_be_as_long_as_asked_and_no_longer() -> None:
    assert problem_of(1, 2, max_length=2) is None
    assert problem_of(1, 2, 3, max_length=2) == "draft of 3 tokens, 2 were asked for"
    assert problem_of(1, max_length=0) == "draft of 1 tokens, 0 were asked for"


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 1 << 62])
def test_ids_stay_within_the_drafters_vocabulary(token_id: int) -> None:
    assert problem_of(1, token_id) == "draft token id outside the vocabulary"
    rows = (row(1, token_id),)
    assert problem_of(1, rows=rows) == "draft_probs id outside the vocabulary"


@pytest.mark.parametrize("rows", [(), (row(1),), (row(1), row(2), row(3))])
def test_there_is_one_row_per_token(rows: tuple[SparseRow, ...]) -> None:
    assert problem_of(1, 2, rows=rows) == "draft_probs and token_ids differ in length"


@pytest.mark.parametrize(
    ("bad_row", "problem"),
    [
        (row(1, 1), "not unique"),
        (row(1, 2, weights=(DRAFT_PROB_SCALE,)), "do not match their weights"),
        (row(1, weights=(HALF, HALF)), "do not match their weights"),
        (row(1, 2, weights=(HALF, HALF - 1)), "do not sum to one"),
        (row(1, 2, weights=(HALF, HALF + 1)), "do not sum to one"),
        (row(1, 2, weights=(DRAFT_PROB_SCALE, 0)), "do not sum to one"),
        (row(1, 2, weights=(DRAFT_PROB_SCALE + 1, -1)), "do not sum to one"),
        (row(), "do not sum to one"),
        (row(2, 3), "the drawn token is not in its draft_probs"),
    ],
)
def test_a_row_that_could_not_have_drawn_its_token_is_refused(bad_row: SparseRow, problem: str) -> None:
    first = problem_of(1, rows=(bad_row,))
    later = problem_of(5, 1, rows=(row(5), bad_row))
    assert first is not None
    assert problem in first
    assert later == first


#   root -> 0 -> 2
#        -> 1 -> 3
#             -> 4
PARENTS = (ROOT, ROOT, 0, 1, 1)


def problem_of_tree(
    *token_ids: int,
    parents: tuple[int, ...] = PARENTS,
    rows: tuple[SparseRow, ...] | None = None,
    max_length: int = 4,
    max_nodes: int = 8,
) -> str | None:
    draft = Draft(request_id="r", round_id=1, position=5, token_ids=token_ids, draft_probs=rows, parents=parents)
    return check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=max_length, max_nodes=max_nodes)


def test_good_trees_have_no_problem() -> None:
    assert problem_of_tree(parents=()) is None
    assert problem_of_tree(7, 8, 7, 7, 8) is None
    assert problem_of_tree(7, 8, 7, 7, 8, rows=(row(7, 8), row(7), row(1, 2, 7, 8))) is None
    assert problem_of_tree(7, 8, 9, 6, 6, parents=(ROOT, 0, 1, ROOT, 0)) is None  # depth first


def test_a_tree_answers_a_question_for_one() -> None:
    assert problem_of_tree(7, 8, 7, 7, 8, max_nodes=5) is None
    assert problem_of_tree(7, 8, 7, 7, 8, max_nodes=4) == "draft of 5 tokens, 4 were asked for"
    assert problem_of_tree(7, 8, 7, 7, 8, max_nodes=0) == "parents, where a chain was asked for"
    assert problem_of_tree(7, 8, 7, 7, 8, max_length=2) is None
    assert problem_of_tree(7, 8, 7, 7, 8, max_length=1) == "draft 2 tokens deep, 1 were asked for"
    assert problem_of_tree(7, 8, 7, 7, parents=(ROOT, 0, 1, 2), max_length=3) == "draft 4 tokens deep, 3 were asked for"


def test_a_chain_may_answer_a_question_for_a_tree() -> None:
    draft = Draft(request_id="r", round_id=1, position=5, token_ids=(1, 2, 3))
    limits = {"draft_vocab_size": VOCAB_SIZE, "max_nodes": 8}
    assert check_draft(draft, max_length=3, **limits) is None
    assert check_draft(draft, max_length=2, **limits) == "draft of 3 tokens, 2 were asked for"


@pytest.mark.parametrize("parents", [(0, ROOT), (ROOT, 1), (ROOT, 2), (ROOT, -2), (1, 0)])
def test_a_parent_comes_before_its_child(parents: tuple[int, ...]) -> None:
    assert problem_of_tree(1, 2, parents=parents) == "a parent is no earlier token"


@pytest.mark.parametrize("num_tokens", [4, 6])
def test_every_token_has_a_parent(num_tokens: int) -> None:
    assert problem_of_tree(*range(num_tokens)) == "parents and token_ids differ in length"


def test_siblings_differ_and_cousins_need_not() -> None:
    assert problem_of_tree(7, 7, 1, 2, 3) == "the same token twice after one parent"
    assert problem_of_tree(7, 8, 1, 2, 2) == "the same token twice after one parent"
    assert problem_of_tree(7, 8, 2, 2, 3) is None


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ((row(7, 8), row(7), row(7, 8), row(7)), "draft_probs are not one per parent"),
        ((row(7, 8), row(7)), "draft_probs are not one per parent"),
        ((row(7, 8), row(7, 8), row(7)), "the drawn token is not in its draft_probs"),  # in another order
        ((row(7), row(7), row(7, 8)), "the drawn token is not in its draft_probs"),  # fewer than the siblings drawn
        ((row(7, 8), row(7), row(7, 8, weights=(1, 1))), "draft_probs weights do not sum to one"),
    ],
)
def test_each_parent_has_the_row_that_drew_its_children(rows: tuple[SparseRow, ...], problem: str) -> None:
    assert problem_of_tree(7, 8, 7, 7, 8, rows=rows) == problem


@pytest.mark.parametrize(
    ("confidences", "problem"),
    [
        ((0.0, 1.0), None),
        ((0.5,), "confidences and token_ids differ in length"),
        ((0.5, 0.5, 0.5), "confidences and token_ids differ in length"),
        ((0.5, -0.1), "confidence outside [0, 1]"),
        ((1.1, 0.5), "confidence outside [0, 1]"),
        ((0.5, float("nan")), "confidence outside [0, 1]"),
    ],
)
def test_confidences_are_probabilities(confidences: tuple[float, ...], problem: str | None) -> None:
    draft = Draft(request_id="r", round_id=1, position=5, token_ids=(1, 2), confidences=confidences)
    assert check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=4) == problem


def test_a_draft_is_asked_for_with_the_sampling_fields_of_its_request() -> None:
    from outrider.verifier_service.messages.request import SamplingParams

    of_request = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {field.name for field in dataclasses.fields(DraftSampling)} <= of_request
