"""Trees by rejection: matrices worked out by hand, exact laws by enumeration, planted mistakes, and the fast path."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from exactness.references import RandomChoices, tree_choices, verify_tree
from fakes.enumerated import (
    Drawn,
    Laws,
    committed_law,
    completed_law,
    draft_of,
    random_laws,
    row_of,
    sampled_trees,
)
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, SparseRow
from outrider.verifier_service.messages.draft_checks import check_draft
from outrider.verifier_service.messages.tree import VerifiedTokens
from tiny.verified import verify_drafts

HIGHEST = 1 - 2**-53
VOCAB_SIZE = 3


def tree(*nodes: tuple[int, int], rows: list[dict[int, float]] | None = None) -> Draft:
    """A tree of (parent, token id); rows in 16ths, so that they are exact."""
    if rows is None:
        return draft_of(nodes, None)
    return draft_of(
        nodes,
        tuple(
            SparseRow(token_ids=tuple(row), weights=tuple(round(prob * DRAFT_PROB_SCALE) for prob in row.values()))
            for row in rows
        ),
    )


def by_reference(target: list[list[float]], draft: Draft | None, uniforms: list[float]) -> tuple[list[int], list[int]]:
    numbers = iter(uniforms)
    verified = verify_tree(torch.tensor(target, dtype=torch.float64), draft, lambda: next(numbers))
    return verified.token_ids, list(verified.path)


def by_batch(target: list[list[float]], draft: Draft | None, uniforms: list[float]) -> tuple[list[int], list[int]]:
    padded = torch.tensor((uniforms + [0.0] * len(target))[: len(target)], dtype=torch.float64)
    (verified,) = verify_drafts(torch.tensor(target, dtype=torch.float64), [draft], padded)
    return verified.token_ids, list(verified.path)


Verified = Callable[[list[list[float]], Draft | None, list[float]], tuple[list[int], list[int]]]


@pytest.fixture(params=[by_reference, by_batch], ids=["reference", "batch"])
def verified(request: pytest.FixtureRequest) -> Verified:
    return request.param


def test_point_mass_siblings_are_judged_by_what_is_left(verified: Verified) -> None:
    # root (1/2, 1/4, 1/4). Token 0 with 1/2; then (0, 1/4, 1/4) of 1/2, so token 1 with 1/2; then only token 2 is left
    target = [[0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    draft = tree((ROOT, 0), (ROOT, 1))
    assert verified(target, draft, [0.4999, 0.0]) == ([0, 1], [0])
    assert verified(target, draft, [0.5, 0.4999, 0.0]) == ([1, 2], [1])
    assert verified(target, draft, [0.5, 0.5, 0.0]) == ([2], [])
    assert verified(target, draft, [0.5, 0.5, HIGHEST]) == ([2], [])


def test_sampled_siblings_are_drawn_without_replacement(verified: Verified) -> None:
    # target (1/4, 1/2, 1/4), draft (1/2, 1/4, 1/4), first child 0: 1/2.
    # Rejected: (0, 1/4, 0) is left: all of it token 1. The row without 0 is (-, 1/2, 1/2).
    # Second child 2: nothing of the target is left for it. Second child 1: 1 / (1/2) > 1, for certain.
    target = [[0.25, 0.5, 0.25], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    row = {0: 0.5, 1: 0.25, 2: 0.25}
    assert verified(target, tree((ROOT, 0), (ROOT, 2), rows=[row]), [0.4999, 0.0]) == ([0, 0], [0])
    assert verified(target, tree((ROOT, 0), (ROOT, 2), rows=[row]), [0.5, 0.0, HIGHEST]) == ([1], [])
    assert verified(target, tree((ROOT, 0), (ROOT, 1), rows=[row]), [0.5, HIGHEST, 0.0]) == ([1, 1], [1])


def test_the_second_sibling_meets_the_renormalised_row(verified: Verified) -> None:
    # target (3/8, 1/4, 1/4, 1/8), draft (3/4, 1/8, 1/8, -), first child 0: (3/8) / (3/4) = 1/2.
    # Rejected: (0, 1/8, 1/8, 1/8) is left, a third each; the row without 0 is (-, 1/2, 1/2, -).
    # Second child 1: (1/3) / (1/2) = 2/3. Rejected: (0, 0, 0, 1/3) is left.
    target = [[0.375, 0.25, 0.25, 0.125], [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]
    draft = tree((ROOT, 0), (ROOT, 1), rows=[{0: 0.75, 1: 0.125, 2: 0.125}])
    assert verified(target, draft, [0.4999, 0.0]) == ([0, 0], [0])
    assert verified(target, draft, [0.5, 0.6666, 0.0]) == ([1, 1], [1])
    assert verified(target, draft, [0.5, 0.6667, 0.0]) == ([3], [])
    assert verified(target, draft, [0.5, 0.6667, HIGHEST]) == ([3], [])


def test_a_walk_goes_down_one_branch_alone(verified: Verified) -> None:
    #   root -> 1 (index 0) -> 0 (index 2)
    #        -> 2 (index 1) -> 1 (index 3) -> 2 (index 4)
    parents, tokens = (ROOT, ROOT, 0, 1, 3), (1, 2, 0, 1, 2)
    draft = tree(*zip(parents, tokens, strict=True))
    sure = np.eye(3).tolist()
    rows = [[0.0, 0.25, 0.75], sure[0], [0.25, 0.75, 0.0], sure[0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]]
    assert verified(rows, draft, [0.2, HIGHEST, 0.0]) == ([1, 0, 0], [0, 2])
    # 1 rejected (3/4 of it is left to 2, so that is sure); 1 with 3/4; 2 with 1/2; the bonus from the last row
    assert verified(rows, draft, [0.25, HIGHEST, 0.7499, 0.4999, 0.0]) == ([2, 1, 2, 0], [1, 3, 4])
    assert verified(rows, draft, [0.25, HIGHEST, 0.7499, 0.5, 0.0]) == ([2, 1, 1], [1, 3])
    assert verified(rows, draft, [0.25, HIGHEST, 0.75, 0.0]) == ([2, 0], [1])


def test_children_stand_anywhere_behind_their_parent(verified: Verified) -> None:
    # depth first: the second child of the root comes after the first one's child
    draft = tree((ROOT, 0), (0, 1), (ROOT, 2), rows=[{0: 0.5, 2: 0.5}, {1: 1.0}])
    sure = np.eye(3).tolist()
    rows = [[0.0, 0.0, 1.0], sure[0], sure[0], sure[1]]
    assert verified(rows, draft, [0.0, HIGHEST, 0.0]) == ([2, 1], [2])


@pytest.mark.parametrize("rows", [None, [{7: 0.5, 1: 0.5}]])
def test_a_token_outside_the_vocabulary_is_never_taken(rows: list[dict[int, float]] | None, verified: Verified) -> None:
    target, draft = [[0.25, 0.75], [1.0, 0.0], [0.0, 1.0]], tree((ROOT, 7), (ROOT, 1), rows=rows)
    if rows is None:  # the point mass takes nothing: token 1 keeps its 3/4
        assert verified(target, draft, [0.0, 0.7499, 0.0]) == ([1, 1], [1])
        assert verified(target, draft, [0.0, 0.75, 0.0]) == ([0], [])
    else:  # the row takes 1/2 of token 1: 1/4 and 1/4 are left, and the row without 7 is token 1 alone
        assert verified(target, draft, [0.0, 0.4999, 0.0]) == ([1, 1], [1])
        assert verified(target, draft, [0.0, 0.5, 0.0]) == ([0], [])


def test_nothing_left_falls_back_to_the_target(verified: Verified) -> None:
    short = 0.5 - 1e-7  # the target's row lost a little to rounding: nothing exceeds the draft's row
    target = [[short, short, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    for uniform, expected in ((0.1, 0), (0.9, 1)):
        draft = tree((ROOT, 0), rows=[{0: 0.5, 1: 0.5}])
        assert verified(target[:2], draft, [HIGHEST, uniform]) == ([expected], [])
    # all of the target is taken by points: token 2 must not come out of what is left by rounding
    points = tree((ROOT, 0), (ROOT, 2))
    assert verified([[1 - 1e-7, 0.0, 0.0], *target[1:]], points, [HIGHEST, 0.0, 0.0]) == ([0], [])


def test_rounding_never_lets_an_impossible_token_through(verified: Verified) -> None:
    long = 0.5 + 1e-7  # the row sums to more than 1: what is left must not fall below nothing
    target = [[long, long, 0.0], *[[1.0, 0.0, 0.0]] * 3]
    points = tree((ROOT, 0), (ROOT, 1), (ROOT, 2))
    assert verified(target, points, [HIGHEST, HIGHEST, HIGHEST, 0.0])[0][0] != 2
    row = SparseRow(token_ids=(0, 1, 2), weights=(32767, 32768, 1))
    assert verified(target, replace(points, draft_probs=(row,)), [HIGHEST] * 3 + [0.0])[0][0] != 2


# --- exact laws ---

TARGET = random_laws(0, VOCAB_SIZE)
DRAFTS = random_laws(1, VOCAB_SIZE)
PADDED = random_laws(2, VOCAB_SIZE + 1)
LAW = completed_law(TARGET, (), 3)


def total_variation(law: np.ndarray) -> float:
    return float(np.abs(law - LAW).sum() / 2)


def law_after(drawn: Iterator[Drawn], verify: Callable[[torch.Tensor, Draft], RandomChoices] = tree_choices) -> float:
    return total_variation(committed_law(TARGET, drawn, verify, vocab_size=VOCAB_SIZE, num_tokens=3))


def by_shape(prefix: tuple[int, ...], row: SparseRow) -> int:
    """As many children as the row and what precedes it suggest."""
    return 1 + (max(row.weights) < 0.6 * DRAFT_PROB_SCALE) + sum(prefix) % 2


@pytest.mark.parametrize(
    ("draft_laws", "num_children"),
    [
        pytest.param(DRAFTS, lambda prefix, row: 1, id="chain"),
        pytest.param(DRAFTS, lambda prefix, row: 2, id="2 x 2"),
        pytest.param(DRAFTS, lambda prefix, row: 3 - len(prefix), id="all, then 2"),
        pytest.param(PADDED, lambda prefix, row: 2 - len(prefix), id="padding"),
        pytest.param(DRAFTS, by_shape, id="by shape"),
    ],
)
def test_sampled_trees_keep_the_targets_law(
    draft_laws: Laws, num_children: Callable[[tuple[int, ...], SparseRow], int]
) -> None:
    drawn = list(sampled_trees(draft_laws, num_children, 2))
    assert sum(prob for _, prob in drawn) == pytest.approx(1.0)
    for draft, _ in drawn[:20]:
        assert check_draft(draft, draft_vocab_size=VOCAB_SIZE + 1, max_length=2, max_nodes=12) is None
    assert law_after(iter(drawn)) < 1e-12


def test_any_point_mass_tree_keeps_the_targets_law() -> None:
    """Whatever chose the tokens, here even one that looks at nothing but the tokens."""
    nodes = [(ROOT, 2), (ROOT, 0), (0, 1), (0, 2), (1, 1), (1, 7), (1, 0)]
    for size in range(len(nodes) + 1):
        assert law_after(iter([(draft_of(tuple(nodes[:size]), None), 1.0)])) < 1e-12


def two(prefix: tuple[int, ...], row: SparseRow) -> int:
    return 2 * (len(prefix) == 0)


def drawn_with_replacement(*, fills_up: bool = True) -> Iterator[Drawn]:
    """Mistake: siblings drawn independently, and where both come out the same the likeliest other one taken."""
    row = row_of(DRAFTS(()))
    probs = dict(zip(row.token_ids, (weight / DRAFT_PROB_SCALE for weight in row.weights), strict=True))
    for first, second in itertools.product(probs, repeat=2):
        nodes = [(ROOT, first), (ROOT, second)]
        if first == second:
            others = [(ROOT, max((id_ for id_ in probs if id_ != first), key=probs.__getitem__))]
            nodes[1:] = others if fills_up else []
        yield draft_of(tuple(nodes), (row,)), probs[first] * probs[second]


def cut_after_drawing() -> Iterator[Drawn]:
    """Mistake: the second sibling is left out where it came out as token 0."""
    for draft, prob in sampled_trees(DRAFTS, two, 1):
        kept = 2 - (draft.token_ids[1] == 0)
        yield replace(draft, token_ids=draft.token_ids[:kept], parents=draft.parents[:kept]), prob


def reordered_after_drawing() -> Iterator[Drawn]:
    """Mistake: siblings are sorted by their probability, as deterministic trees rightly do."""
    for draft, prob in sampled_trees(DRAFTS, two, 1):
        (row,) = draft.draft_probs
        weights = dict(zip(row.token_ids, row.weights, strict=True))
        yield replace(draft, token_ids=tuple(sorted(draft.token_ids, key=lambda id_: -weights[id_]))), prob


def misreported() -> Iterator[Drawn]:
    """Mistake: the rows of another node."""
    for draft, prob in sampled_trees(DRAFTS, lambda prefix, row: 2 - len(prefix), 2):
        first, *others = draft.draft_probs
        yield replace(draft, draft_probs=(first, *reversed(others))), prob


@pytest.mark.parametrize("drawn", [drawn_with_replacement, cut_after_drawing, reordered_after_drawing, misreported])
def test_a_drafters_mistake_shows_in_the_law(drawn: Callable[[], Iterator[Drawn]]) -> None:
    mistaken = list(drawn())
    assert sum(prob for _, prob in mistaken) == pytest.approx(1.0)
    assert law_after(iter(mistaken)) > 1e-3


def cut_by_the_first() -> Iterator[Drawn]:
    for draft, prob in sampled_trees(DRAFTS, two, 1):
        kept = 2 - (draft.token_ids[0] == 0)
        yield replace(draft, token_ids=draft.token_ids[:kept], parents=draft.parents[:kept]), prob


def test_leaving_a_sibling_out_by_those_before_it_is_no_mistake() -> None:
    """Nor is leaving out one that was drawn twice: what another one would have been is not known then."""
    assert law_after(cut_by_the_first()) < 1e-12
    assert law_after(drawn_with_replacement(fills_up=False)) < 1e-12


def careless_choices(
    target_probs: torch.Tensor, draft: Draft, *, updates_target: bool, updates_row: bool
) -> RandomChoices:
    """Verify two siblings of the root, with the one or the other update left out."""
    (row,) = draft.draft_probs
    target = target_probs[0].numpy().copy()
    law = np.zeros(len(target))
    law[list(row.token_ids)] = row.weights
    law /= law.sum()
    for index, token_id in enumerate(draft.token_ids):
        accepted = min(target[token_id] / law[token_id], 1.0)
        if (yield [accepted, 1.0 - accepted]) == 0:
            last = yield target_probs[index + 1].tolist()
            return VerifiedTokens.along(draft, [index], last)
        if updates_target:
            target = np.maximum(target - law, 0.0)
            target /= target.sum()
        if updates_row:
            law[token_id] = 0.0
            law /= law.sum()
    last = yield target.tolist()
    return VerifiedTokens.along(draft, [], last)


@pytest.mark.parametrize(
    ("updates_target", "updates_row", "is_right"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_verifiers_mistake_shows_in_the_law(updates_target: bool, updates_row: bool, is_right: bool) -> None:
    def verify(rows: torch.Tensor, draft: Draft) -> RandomChoices:
        return careless_choices(rows, draft, updates_target=updates_target, updates_row=updates_row)

    off = law_after(sampled_trees(DRAFTS, two, 1), verify)
    assert off < 1e-12 if is_right else off > 1e-3
