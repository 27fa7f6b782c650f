"""Typical acceptance: thresholds worked out by hand, trees, and the fast path beside the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from exactness.references import typical_path
from outrider.verifier_service.messages.draft import ROOT, Draft
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams
from tiny.verified import verify_drafts

Paths = Callable[[torch.Tensor, Draft | None, SamplingParams], tuple[int, ...]]


def typical(epsilon: float, delta: float) -> SamplingParams:
    return SamplingParams(acceptance=AcceptanceRule.TYPICAL, typical_epsilon=epsilon, typical_delta=delta)


def draft_of(*token_ids: int, parents: tuple[int, ...] | None = None) -> Draft:
    return Draft(request_id="r", round_id=1, position=3, token_ids=token_ids, parents=parents)


@pytest.fixture(params=["reference", "batch"])
def path_of(request: pytest.FixtureRequest) -> Paths:
    if request.param == "reference":
        return typical_path
    return batch_path


def batch_path(probs: torch.Tensor, draft: Draft | None, sampling: SamplingParams) -> tuple[int, ...]:
    numbers = torch.full((len(probs),), 0.5, dtype=torch.float64)
    (verified,) = verify_drafts(probs, [draft], numbers, sampling)
    return verified.path


def test_the_threshold_falls_with_the_entropy(path_of: Paths) -> None:
    # one bit of entropy: exp(-H) = 1/2. Two bits: 1/4
    halves, quarters = [0.5, 0.5, 0.0, 0.0], [0.25] * 4
    probs = torch.tensor([halves, quarters, quarters], dtype=torch.float64)
    assert path_of(probs, draft_of(0, 3), typical(1.0, 0.999)) == (0, 1)  # 1/2 > 0.999/2, 1/4 > 0.999/4
    assert path_of(probs, draft_of(2, 3), typical(1.0, 0.999)) == ()
    # a skewed law: H = 3/4 * 0.5623 ... exp(-H) of (3/4, 1/8, 1/8) = 0.75**0.75 * 0.125**0.25 = 0.4792
    skewed = torch.tensor([[0.75, 0.125, 0.125], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert path_of(skewed, draft_of(1), typical(1.0, 0.26)) == (0,)  # 0.26 * 0.4792 = 0.1246
    assert path_of(skewed, draft_of(1), typical(1.0, 0.262)) == ()  # 0.1255


def test_epsilon_bounds_what_is_asked(path_of: Paths) -> None:
    probs = torch.tensor([[0.75, 0.125, 0.125], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert path_of(probs, draft_of(1), typical(0.124, 1.0)) == (0,)
    assert path_of(probs, draft_of(1), typical(0.125, 1.0)) == ()  # not above it


def test_the_first_token_that_is_not_typical_ends_a_chain(path_of: Paths) -> None:
    row = [0.9, 0.1, 0.0]
    probs = torch.tensor([row] * 4, dtype=torch.float64)
    assert path_of(probs, draft_of(0, 1, 0), typical(0.2, 1.0)) == (0,)
    assert path_of(probs, draft_of(0, 0, 0), typical(0.2, 1.0)) == (0, 1, 2)
    assert path_of(probs, draft_of(0, 7, 0), typical(0.01, 0.01)) == (0,)  # outside the vocabulary
    assert path_of(probs[:1], None, typical(0.2, 1.0)) == path_of(probs[:1], draft_of(), typical(0.2, 1.0)) == ()


def test_the_longest_path_of_a_tree_counts(path_of: Paths) -> None:
    #   root -> 0 (index 0) -> 1 (index 2), not typical
    #        -> 1 (index 1) -> 0 (index 3) -> 0 (index 4)
    draft = draft_of(0, 1, 1, 0, 0, parents=(ROOT, ROOT, 0, 1, 3))
    probs = torch.tensor([[0.6, 0.4], [0.99, 0.01], [0.5, 0.5], [0.5, 0.5], [0.9, 0.1], [0.5, 0.5]])
    assert path_of(probs, draft, typical(0.3, 1.0)) == (1, 3, 4)
    assert path_of(probs, draft, typical(0.45, 1.0)) == (0,)
