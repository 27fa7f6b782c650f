"""Rejection sampling by hand-written matrices: what is accepted, and what residual it is recovered from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from exactness.law import assert_law
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


def test_a_token_that_the_target_likes_better_is_always_accepted(verified: Verify) -> None:
    target, draft = [[0.25, 0.75], [0.0, 1.0]], draft_of(1, rows=[{0: 0.5, 1: 0.5}])
    assert verified(target, draft, [HIGHEST, HIGHEST]) == [1, 1]


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


def test_disjoint_supports_always_reject(verified: Verify) -> None:
    target, draft = [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]], draft_of(2, rows=[{2: 0.5, 3: 0.5}])
    assert verified(target, draft, [0.0, 0.0]) == [0]
    assert verified(target, draft, [0.0, HIGHEST]) == [1]


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


def test_the_first_rejection_ends_the_draft(verified: Verify) -> None:
    target = [[0.5, 0.5], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]
    assert verified(target, draft_of(0, 1, 0), [0.1, 0.1, 0.1]) == [0, 0]


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


def random_case(rng: np.random.Generator, vocab_size: int) -> tuple[np.ndarray, Draft | None]:
    """A target and a draft with holes, point masses, padded ids and no draft at all."""
    length = int(rng.integers(0, 4))
    target = rng.dirichlet([0.5] * vocab_size, size=length + 1) * (rng.random((length + 1, vocab_size)) < 0.8)
    target[:, 0] += 1e-3
    target /= target.sum(axis=1, keepdims=True)
    if length == 0:
        return target, None if rng.random() < 0.5 else draft_of()
    supports = [rng.choice(vocab_size + 2, size=4, replace=False) for _ in range(length)]
    token_ids = [int(rng.choice(support)) for support in supports]
    shares = (0.5, 0.25, 0.125, 0.125)
    rows = [dict(zip(support.tolist(), shares, strict=True)) for support in supports]
    return target, draft_of(*token_ids, rows=None if rng.random() < 0.3 else rows)


def test_the_batch_matches_the_reference() -> None:
    rng = np.random.default_rng(0)
    cases = [random_case(rng, 8) for _ in range(400)]
    target = torch.from_numpy(np.concatenate([target for target, _ in cases]))
    uniforms = torch.from_numpy(rng.random(len(target)))
    batch = tokens_of(target, [draft for _, draft in cases], uniforms)
    start, num_accepted = 0, 0
    for (rows, draft), tokens in zip(cases, batch, strict=True):
        numbers = iter(uniforms[start : start + len(rows)].tolist())
        assert tokens == verify_by_rejection(torch.from_numpy(rows), draft, lambda: next(numbers))  # noqa: B023
        start, num_accepted = start + len(rows), num_accepted + len(tokens) - 1
    assert num_accepted > 50


def test_the_reference_has_the_targets_law() -> None:
    """5,000 draws of the slow path; the fast one is tested with many more through `verify`."""
    rng = np.random.default_rng(1)
    law, draft_law = np.array([0.1, 0.6, 0.3]), {0: 0.5, 1: 0.25, 2: 0.25}
    target = torch.tensor(np.stack([law, law]))
    drawn = rng.choice(3, size=5000, p=list(draft_law.values()))
    first = [verify_by_rejection(target, draft_of(int(id_), rows=[draft_law]), rng.random)[0] for id_ in drawn]
    assert_law(np.bincount(first, minlength=3), law)


def test_shapes_are_checked() -> None:
    with pytest.raises(AssertionError):
        verify_by_rejection(torch.ones(1, 4), draft_of(1), lambda: 0.5)
    with pytest.raises(AssertionError):
        tokens_of(torch.ones(2, 4), [draft_of(1)], torch.zeros(2))  # float32 uniforms
