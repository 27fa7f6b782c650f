"""Rejection sampling by hand-written matrices: what is accepted, and what residual it is recovered from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from exactness.references import verify_by_rejection
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft, SparseRow
from tiny.verified import verify_drafts

HIGHEST = 1 - 2**-53


def draft_of(*token_ids: int, rows: list[dict[int, float]] | None = None) -> Draft:
    """Rows in 16ths, so that they are exact."""
    sparse = None
    if rows is not None:
        weights = [tuple(round(prob * DRAFT_PROB_SCALE) for prob in row.values()) for row in rows]
        sparse = tuple(SparseRow(token_ids=tuple(row), weights=w) for row, w in zip(rows, weights, strict=True))
        assert all(sum(row.weights) == DRAFT_PROB_SCALE for row in sparse)
    return Draft(request_id="r", round_id=1, position=3, token_ids=token_ids, draft_probs=sparse)


def by_reference(target: list[list[float]], draft: Draft | None, uniforms: list[float]) -> list[int]:
    numbers: Iterator[float] = iter(uniforms)
    return verify_by_rejection(torch.tensor(target), draft, lambda: next(numbers))


def by_batch(target: list[list[float]], draft: Draft | None, uniforms: list[float]) -> list[int]:
    padded = (uniforms + [0.0] * len(target))[: len(target)]
    return tokens_of(torch.tensor(target), [draft], torch.tensor(padded, dtype=torch.float64))[0]


def tokens_of(target: torch.Tensor, drafts: Sequence[Draft | None], uniforms: torch.Tensor) -> list[list[int]]:
    return [tokens.token_ids for tokens in verify_drafts(target, drafts, uniforms)]


Verify = Callable[[list[list[float]], Draft | None, list[float]], list[int]]


@pytest.fixture(params=[by_reference, by_batch], ids=["reference", "batch"])
def verified(request: pytest.FixtureRequest) -> Verify:
    return request.param


def test_a_token_is_accepted_below_the_ratio_and_no_further(verified: Verify) -> None:
    target, draft = [[0.25, 0.75], [1.0, 0.0]], draft_of(0, rows=[{0: 0.5, 1: 0.5}])
    assert verified(target, draft, [0.4999, 0.0]) == [0, 0]  # 0.25 / 0.5
    assert verified(target, draft, [0.5, 0.0]) == [1]


def test_the_residual_is_what_the_draft_left_short(verified: Verify) -> None:
    # target - draft = (-0.5, 0.125, 0.25, 0.125), so the residual is (0, 1/4, 1/2, 1/4)
    target = [[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]
    draft = draft_of(0, rows=[{0: 0.75, 1: 0.125, 3: 0.125}])
    recovered = [verified(target, draft, [0.9, u]) for u in (0.0, 0.249, 0.251, 0.749, 0.751, HIGHEST)]
    assert recovered == [[1], [1], [2], [2], [3], [3]]


def test_equal_laws_always_accept(verified: Verify) -> None:
    target = [[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0.0, 0.0, 1.0]]
    rows = [{0: 0.5, 1: 0.25, 2: 0.25}] * 2
    for token_id in range(3):
        assert verified(target, draft_of(token_id, 2, rows=rows), [HIGHEST] * 3) == [token_id, 2, 2]


def test_a_point_mass_is_accepted_with_its_target_probability(verified: Verify) -> None:
    target, draft = [[0.25, 0.5, 0.25], [0.0, 1.0, 0.0]], draft_of(1)
    assert verified(target, draft, [0.4999, 0.0]) == [1, 1]
    assert verified(target, draft, [0.5, 0.4999]) == [0]
    assert verified(target, draft, [0.5, 0.5]) == [2]


@pytest.mark.parametrize("rows", [None, [{1: 0.5, 2: 0.25, 7: 0.25}]])
def test_a_token_outside_the_vocabulary_is_rejected_and_recovered(
    rows: list[dict[int, float]] | None, verified: Verify
) -> None:
    target, draft = [[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]], draft_of(7, rows=rows)
    # the point mass leaves the target as it is; the row leaves (0.25, 0, 0): the token's own share goes nowhere
    expected = [[0], [1], [2]] if rows is None else [[0], [0], [0]]
    assert [verified(target, draft, [0.0, u]) for u in (0.1, 0.5, 0.9)] == expected


@pytest.mark.parametrize("draft", [None, draft_of(), draft_of(rows=[])])
def test_an_empty_draft_is_plain_sampling(draft: Draft | None, verified: Verify) -> None:
    target = [[0.0, 0.25, 0.75, 0.0]]
    assert [verified(target, draft, [u]) for u in (0.0, 0.249, 0.251, HIGHEST)] == [[1], [1], [2], [2]]


def test_an_empty_residual_falls_back_to_the_target(verified: Verify) -> None:
    short = 0.5 - 1e-7  # the target's row lost a little to rounding: nothing exceeds the draft's row
    target, draft = [[short, short, 0.0], [0.0, 0.0, 1.0]], draft_of(0, rows=[{0: 0.5, 1: 0.5}])
    assert verified(target, draft, [HIGHEST, 0.1]) == [0]
    assert verified(target, draft, [HIGHEST, 0.9]) == [1]
    assert verified([[1 - 1e-7, 0.0], [0.0, 1.0]], draft_of(0), [HIGHEST, 0.5]) == [0]
