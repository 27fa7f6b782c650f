"""Block verification: matrices worked out by hand, exact laws and expected lengths, and the fast path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from exactness.references import RandomChoices, block_choices, tree_choices, verify_block
from fakes.enumerated import (
    Drawn,
    Laws,
    committed_law,
    completed_law,
    expected_length,
    random_laws,
    sampled_trees,
)
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft, SparseRow
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams
from tiny.verified import verify_drafts

HIGHEST = 1 - 2**-53
VOCAB_SIZE = 3


def chain(*token_ids: int, rows: list[dict[int, float]] | None = None) -> Draft:
    """Rows in 16ths, so that they are exact."""
    sparse = None
    if rows is not None:
        sparse = tuple(
            SparseRow(token_ids=tuple(row), weights=tuple(round(prob * DRAFT_PROB_SCALE) for prob in row.values()))
            for row in rows
        )
    return Draft(request_id="r", round_id=1, position=3, token_ids=token_ids, draft_probs=sparse)


def by_reference(target: list[list[float]], draft: Draft | None, uniforms: list[float]) -> list[int]:
    verified = verify_block(torch.tensor(target, dtype=torch.float64), draft, iter(uniforms).__next__)
    assert verified.path == tuple(range(len(verified.token_ids) - 1))
    return verified.token_ids


def by_batch(target: list[list[float]], draft: Draft | None, uniforms: list[float]) -> list[int]:
    numbers = torch.tensor(uniforms, dtype=torch.float64)
    blocks = SamplingParams(acceptance=AcceptanceRule.BLOCK)
    (verified,) = verify_drafts(torch.tensor(target, dtype=torch.float64), [draft], numbers, blocks)
    assert verified.path == tuple(range(len(verified.token_ids) - 1))
    return verified.token_ids


Verified = Callable[[list[list[float]], Draft | None, list[float]], list[int]]


@pytest.fixture(params=[by_reference, by_batch], ids=["reference", "batch"])
def verified(request: pytest.FixtureRequest) -> Verified:
    return request.param


def test_the_papers_example(verified: Verified) -> None:
    # Section 3: target (1/3, 2/3) and draft (2/3, 1/3) at every position, two tokens. Rounded to 16ths here: target
    # (1/4, 3/4), draft (3/4, 1/4). Draft 0, 1: kept = 1/3, then min(1/3 * 3, 1) = 1: the whole chain is always taken,
    # where token by token stops after 1/3.
    target, row = [[0.25, 0.75]] * 3, {0: 0.75, 1: 0.25}
    assert verified(target, chain(0, 1, rows=[row, row]), [HIGHEST, HIGHEST, 0.0]) == [0, 1, 0]
    # Draft 0, 0: kept = 1/3, 1/9. Whole with 1/9. One token: residual max((1/12, 1/4) - (3/4, 1/4), 0) = 0, so never;
    # none: residual max((1/4, 3/4) - (3/4, 1/4), 0) = (0, 1/2), token 1
    assert verified(target, chain(0, 0, rows=[row, row]), [0.0, 0.1111, 0.3]) == [0, 0, 1]
    assert verified(target, chain(0, 0, rows=[row, row]), [0.0, 0.1112, 0.0]) == [1]


def test_a_prefix_is_accepted_by_what_its_residual_leaves(verified: Verified) -> None:
    # target (1/2, 1/4, 1/4) then (1/8, 5/8, 1/4); draft (3/4, 1/4, -) then (3/4, -, 1/4). Draft 0, 0:
    # kept = 2/3, then 2/3 * 1/6 = 1/9. After one token: residual max((1/12, 5/12, 1/6) - (3/4, 0, 1/4), 0)
    # = (0, 5/12, 0), accepted with (5/12) / (5/12 + 1/3) = 5/9, then token 1.
    # After none: max((1/2, 1/4, 1/4) - (3/4, 1/4, 0), 0) = (0, 0, 1/4): token 2
    target = [[0.5, 0.25, 0.25], [0.125, 0.625, 0.25], [1.0, 0.0, 0.0]]
    draft = chain(0, 0, rows=[{0: 0.75, 1: 0.25}, {0: 0.75, 2: 0.25}])
    assert verified(target, draft, [HIGHEST, 0.1111, 0.0]) == [0, 0, 0]
    assert verified(target, draft, [0.5555, 0.1112, 0.0]) == [0, 1]
    assert verified(target, draft, [0.5555, 0.1112, HIGHEST]) == [0, 1]
    assert verified(target, draft, [0.5556, 0.1112, 0.0]) == [2]


def test_the_residual_after_a_prefix_is_weighed_by_kept(verified: Verified) -> None:
    # target (1/2, 1/2), then (1/2, 1/4, 1/4) ...; draft all on 0 first, then (1/4, 3/4, -). Draft 0, 1: kept = 1/2,
    # then 1/2 * (1/4) / (3/4) = 1/6. After one: max((1/4, 1/8, 1/8) - (1/4, 3/4, 0), 0) = (0, 0, 1/8): only token 2,
    # where token by token token 0 is in it too. Accepted with (1/8) / (1/8 + 1/2) = 1/5
    target = [[0.5, 0.5, 0.0], [0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]
    draft = chain(0, 1, rows=[{0: 1.0}, {0: 0.25, 1: 0.75}])
    assert verified(target, draft, [0.1999, 0.1667, 0.0]) == [0, 2]
    assert verified(target, draft, [0.2001, 0.1667, 0.0]) == [1]
    assert verified(target, draft, [0.2001, 0.1666, 0.0]) == [0, 1, 0]


def test_equal_laws_always_accept(verified: Verified) -> None:
    target, rows = [[0.5, 0.25, 0.25]] * 3, [{0: 0.5, 1: 0.25, 2: 0.25}] * 2
    assert verified(target, chain(1, 2, rows=rows), [HIGHEST, HIGHEST, 0.0]) == [1, 2, 0]
    short = [[0.5 - 1e-7, 0.25, 0.25]] * 3  # a row that lost a little to rounding: kept is just below 1
    assert verified(short, chain(0, 0, rows=rows), [HIGHEST, HIGHEST, 0.0])[0] == 0


@pytest.mark.parametrize("rows", [None, [{7: 0.5, 1: 0.5}, {1: 1.0}]])
def test_a_token_outside_the_vocabulary_is_recovered(rows: list[dict[int, float]] | None, verified: Verified) -> None:
    target = [[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]
    # nothing is kept of it or after it; the row takes token 1, the point mass takes nothing
    assert verified(target, chain(7, 1, rows=rows), [0.0, 0.0, 0.9]) == ([1] if rows is None else [0])


def test_padding_in_a_row_takes_nothing_from_the_target(verified: Verified) -> None:
    # draft 0, 0: kept = 1/2, 1/2. After one: max((1/4, 1/4) - (1/2, 0), 0) = (0, 1/4), accepted with
    # (1/4) / (1/4 + 1/2) = 1/3: the half of the row that lies outside the vocabulary is no part of it
    target = [[0.5, 0.5], [0.5, 0.5], [1.0, 0.0]]
    draft = chain(0, 0, rows=[{0: 1.0}, {0: 0.5, 7: 0.5}])
    assert verified(target, draft, [0.3333, 0.5, 0.0]) == [0, 1]
    assert verified(target, draft, [0.3334, 0.5, 0.0]) == [1]


# --- exact laws ---

TARGET = random_laws(10, VOCAB_SIZE)
LAW = completed_law(TARGET, (), 4)


def chains(draft_laws: Laws, goes_on: Callable[[tuple[int, ...], SparseRow], bool]) -> Iterator[Drawn]:
    """Enumerate chains of at most three tokens; whether one goes on is asked before the next token is drawn."""
    for draft, prob in sampled_trees(draft_laws, goes_on, 3):
        yield replace(draft, parents=None), prob


def law_after(drawn: Iterator[Drawn], verify: Callable[[torch.Tensor, Draft], RandomChoices]) -> float:
    law = committed_law(TARGET, drawn, verify, vocab_size=VOCAB_SIZE, num_tokens=4)
    return float(np.abs(law - LAW).sum() / 2)


@pytest.mark.parametrize(
    "goes_on",
    [
        pytest.param(lambda prefix, row: True, id="all"),
        pytest.param(lambda prefix, row: sum(prefix) % 3 < 2, id="by prefix"),
        pytest.param(lambda prefix, row: max(row.weights) > 0.5 * DRAFT_PROB_SCALE, id="by row"),
    ],
)
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 1], ids=["", "padding"])
def test_blocks_keep_the_targets_law(goes_on: Callable[[tuple[int, ...], SparseRow], bool], vocab_size: int) -> None:
    drawn = list(chains(random_laws(11, vocab_size), goes_on))
    assert sum(prob for _, prob in drawn) == pytest.approx(1.0)
    assert len({len(draft.token_ids) for draft, _ in drawn}) >= 1
    assert law_after(iter(drawn), block_choices) < 1e-12


def test_point_masses_keep_the_targets_law() -> None:
    for tokens in ((0, 1, 2), (2, 2, 2), (1, 7, 0)):
        assert law_after(iter([(chain(*tokens), 1.0)]), block_choices) < 1e-12


def test_the_expected_length_is_never_shorter() -> None:
    gains = []
    for seed in range(8):
        target = random_laws(100 + seed, VOCAB_SIZE)
        drawn = list(chains(random_laws(200 + seed, VOCAB_SIZE), lambda prefix, row: True))
        by_token = expected_length(target, iter(drawn), tree_choices)  # of a chain: rejection sampling
        gains.append(expected_length(target, iter(drawn), block_choices) - by_token)
    assert min(gains) > -1e-12
    assert max(gains) > 0.1
    points = [(chain(0, 1, 2), 1.0)]
    by_token = expected_length(TARGET, iter(points), tree_choices)
    assert expected_length(TARGET, iter(points), block_choices) == pytest.approx(by_token, abs=1e-12)


def test_the_papers_gain() -> None:
    """Target (1/3, 2/3), draft (2/3, 1/3), two tokens: 10/9 tokens on average token by token, 11/9 by blocks."""

    def expected(verify: Callable[[torch.Tensor, Draft], RandomChoices]) -> float:
        target, draft = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
        drawn = sampled_trees(lambda prefix: draft, lambda prefix, row: 1, 2)
        return expected_length(lambda prefix: target, ((replace(d, parents=None), prob) for d, prob in drawn), verify)

    assert expected(tree_choices) == pytest.approx(10 / 9, abs=1e-4)  # rows are rounded to integers
    assert expected(block_choices) == pytest.approx(11 / 9, abs=1e-4)


def confident_alone(drawn: Iterator[Drawn]) -> Iterator[Drawn]:
    """Mistake: cut at a drawn token that the drafter held unlikely."""
    for draft, prob in drawn:
        weights = [
            dict(zip(row.token_ids, row.weights, strict=True))[token_id] > 0.3 * DRAFT_PROB_SCALE
            for row, token_id in zip(draft.draft_probs, draft.token_ids, strict=True)
        ]
        length = [*weights, False].index(False)
        yield replace(draft, token_ids=draft.token_ids[:length], draft_probs=draft.draft_probs[:length]), prob


def test_a_drafters_mistake_shows_in_the_law() -> None:
    assert law_after(confident_alone(chains(random_laws(11, VOCAB_SIZE), lambda *_: True)), block_choices) > 1e-3


def test_the_rule_must_not_be_chosen_by_a_shape_that_drawn_tokens_decided() -> None:
    """Why a tree is never verified by blocks, even one that came out as a chain."""

    def goes_on(prefix: tuple[int, ...], row: SparseRow) -> bool:
        return prefix != (1, 0)

    def by_length(rows: torch.Tensor, draft: Draft) -> RandomChoices:
        return (tree_choices if len(draft.token_ids) == 2 else block_choices)(rows, draft)

    drawn = list(chains(random_laws(11, VOCAB_SIZE), goes_on))
    assert law_after(iter(drawn), block_choices) < 1e-12
    assert law_after(iter(drawn), tree_choices) < 1e-12
    assert law_after(iter(drawn), by_length) > 1e-3
