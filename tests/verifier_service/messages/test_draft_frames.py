"""Frames of columns: what a row says, what is checked of it, and what crosses the wire."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Commit, Commits, Draft, Drafts, SparseRow
from outrider.verifier_service.messages.draft_checks import check_draft, check_drafts
from outrider.verifier_service.messages.link import DRAFTER_MESSAGES, VERIFIER_MESSAGES, peek_request_ids
from outrider.verifier_service.messages.wire import WireError, decode, encode

VOCAB_SIZE, MAX_LENGTH = 10, 3
COMMITS = [
    Commit(request_id="a", round_id=1, position=5, token_ids=(3, 4), max_length=2),
    Commit(request_id="b", round_id=1 << 40, position=9, token_ids=(), max_length=0),
    Commit(request_id="c", round_id=2, position=1, token_ids=(7,), max_length=9),
]


def row(*ids: int, weights: tuple[int, ...] | None = None) -> SparseRow:
    if weights is None:
        weights = (DRAFT_PROB_SCALE - len(ids) + 1, *(1 for _ in ids[1:]))
    return SparseRow(token_ids=ids, weights=weights)


def point(*token_ids: int, confidence: float = 0.5, request_id: str = "p") -> Draft:
    chances = (confidence,) * len(token_ids)
    return Draft(request_id=request_id, round_id=8, position=2, token_ids=token_ids, confidences=chances)


def drawn(*token_ids: int, rows: tuple[SparseRow, ...], request_id: str = "d") -> Draft:
    return Draft(request_id=request_id, round_id=8, position=2, token_ids=token_ids, draft_probs=rows)


GOOD = drawn(1, 2, rows=(row(5, 1), row(2)))


def test_a_frame_of_commits_says_what_its_rows_do() -> None:
    frame = decode(encode(Commits.of(COMMITS)), VERIFIER_MESSAGES)
    assert list(frame.commits()) == COMMITS
    assert list(frame.take([2, 0]).commits()) == [COMMITS[2], COMMITS[0]]
    assert frame != frame.take([0]) != COMMITS[0]


@pytest.mark.parametrize(
    "drafts",
    [
        [point(3, 4), point(request_id="q"), point(9, request_id="r")],
        [replace(draft, confidences=None) for draft in (point(3, 4), point(5, request_id="q"))],
        [GOOD, drawn(request_id="e", rows=()), drawn(7, request_id="f", rows=(row(9, 8, 7),))],
    ],
)
def test_a_frame_of_drafts_says_what_its_rows_do(drafts: list[Draft]) -> None:
    drafts = [replace(one, draft_probs=one.draft_probs or None) for one in drafts]
    frame = decode(encode(Drafts.of(drafts)), DRAFTER_MESSAGES)
    assert list(frame.drafts()) == drafts
    assert [*frame.drafts()] == drafts
    assert list(frame.take([len(drafts) - 1, 0]).drafts()) == [drafts[-1], drafts[0]]


BAD = [
    point(1, 2, 3, 4),
    point(1, VOCAB_SIZE),
    point(-1),
    point(1, confidence=1.5),
    point(1, confidence=float("nan")),
    drawn(1, rows=(row(2, 3),)),
    drawn(1, rows=(row(1, 1),)),
    drawn(1, rows=(row(1, -1, -1),)),
    drawn(1, rows=(row(1, VOCAB_SIZE),)),
    drawn(1, rows=(row(1, weights=(DRAFT_PROB_SCALE - 1,)),)),
    drawn(1, rows=(row(1, 2, weights=(DRAFT_PROB_SCALE, 0)),)),
    drawn(1, rows=(row(1, 2, weights=(DRAFT_PROB_SCALE + 1, -1)),)),
    drawn(1, 2, rows=(row(1), SparseRow(token_ids=(), weights=()))),
]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_row_is_that_rows_failure_alone(bad: Draft) -> None:
    good = GOOD if bad.draft_probs else point(1, 2, 3)
    assert check_draft(bad, draft_vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH) is not None
    assert check_draft(good, draft_vocab_size=VOCAB_SIZE, max_length=MAX_LENGTH) is None
    frame = Drafts.of([replace(good, request_id="0"), bad, replace(good, request_id="2")])
    limits = np.full(3, MAX_LENGTH)
    assert check_drafts(frame, draft_vocab_size=VOCAB_SIZE, max_lengths=limits).tolist() == [False, True, False]


def test_each_row_has_its_own_longest_length() -> None:
    frame = Drafts.of([point(1, 2), point(1, 2, request_id="q")])
    assert check_drafts(frame, draft_vocab_size=VOCAB_SIZE, max_lengths=np.array([2, 1])).tolist() == [False, True]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lengths": np.array([2, 2])}, "lengths must be at least 0 and sum to 3"),
        ({"lengths": np.array([4, -1])}, "lengths must be"),
        ({"round_ids": np.array([1])}, "round_ids must have one number for each of 2 rows"),
        ({"request_ids": ("p", "p")}, "request_ids must be different"),
        ({"confidences": np.ones(2)}, "confidences must have one number"),
        ({"row_sizes": np.array([1, 1])}, "row_sizes must have one number for each of 3 rows"),
        ({"row_sizes": np.array([1, 1, 1])}, "row_sizes must be at least 0 and sum to 0"),
        ({"row_ids": np.array([1], np.int32)}, "row_weights must have one number"),
    ],
)
def test_ragged_columns_make_the_whole_frame_bad(changes: dict[str, object], problem: str) -> None:
    frame = Drafts.of([point(1, 2), point(3, request_id="q")])
    columns = {field.name: getattr(frame, field.name) for field in fields(frame)}
    with pytest.raises(ValueError, match=problem):
        Drafts(**(columns | changes))


def test_a_column_on_the_wire_is_checked() -> None:
    payload = encode(Commits.of(COMMITS))
    short = payload.replace(encode(COMMITS[0])[:0] + b"counts\xc4\x18", b"counts\xc4\x10", 1)
    assert short != payload
    with pytest.raises(WireError):
        decode(short, VERIFIER_MESSAGES)
    assert peek_request_ids(payload) == ("a", "b", "c")
