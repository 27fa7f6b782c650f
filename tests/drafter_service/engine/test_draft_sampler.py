"""Draft tokens come from exactly the row that is sent with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from exactness.law import assert_law
from outrider.drafter_service.engine.draft_sampler import (
    Children,
    ChildrenOnDevice,
    launch_children,
    read_children,
)
from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft, DraftSampling, SparseRow
from outrider.verifier_service.messages.draft_checks import check_draft
from outrider.verifier_service.sampling.coupled_sampler import gumbel_noise
from tiny.drafted import draft_tokens
from tiny.played_graphs import HostReads
from tiny.verified import target_probs

GREEDY = DraftSampling(temperature=0.0)
SAMPLED = DraftSampling(temperature=1.0)
SEEDED = DraftSampling(temperature=1.0, seed=11, choice_index=2)


def draft_children(*arguments: object, **options: object) -> list[Children]:
    return read_children(launch_children(*arguments, **options))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return 2 * torch.randn(num_rows, vocab_size, generator=generator(5))


def as_law(row: SparseRow, vocab_size: int) -> np.ndarray:
    law = np.zeros(vocab_size)
    law[list(row.token_ids)] = np.array(row.weights) / DRAFT_PROB_SCALE
    return law


def test_greedy_takes_the_argmax_and_sends_no_row() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [9.0, 0.0, 1.0]])
    samplings = [GREEDY, DraftSampling(temperature=1e-5, seed=3)]
    assert draft_tokens(logits, samplings, [4, 4], generator(), vocab_size=3) == [(1, None), (0, None)]


def test_a_padded_vocabulary_changes_no_seeded_choice() -> None:
    logits = random_logits(20, 40)
    padded = torch.cat([logits, torch.full((20, 8), 50.0)], dim=1)
    of = [draft_tokens(rows, [SEEDED] * 20, range(20), generator(), vocab_size=40) for rows in (logits, padded)]
    assert of[0] == of[1]


@pytest.mark.parametrize("top_n", [1, 4, 32])
def test_rows_are_valid_and_close_to_the_drafters_law(top_n: int) -> None:
    logits, shape = random_logits(100, 64), DraftSampling(temperature=0.8, top_k=20, top_p=0.95, min_p=0.01)
    laws = target_probs(logits, [shape] * 100)
    drafted = draft_tokens(logits, [shape] * 100, range(100), generator(), vocab_size=64, top_n=top_n)
    for law, (token_id, row) in zip(laws, drafted, strict=True):
        assert row is not None
        draft = Draft(request_id="r", round_id=1, position=0, token_ids=(token_id,), draft_probs=(row,))
        assert check_draft(draft, draft_vocab_size=64, max_length=1) is None
        assert len(row.token_ids) <= top_n
        assert (law[list(row.token_ids)] > 0).all()
        best = law.topk(top_n).values.double()
        kept = torch.zeros(64, dtype=torch.float64)
        kept[law.topk(top_n).indices] = best / best.sum()
        assert np.abs(as_law(row, 64) - kept.numpy()).max() <= 1 / DRAFT_PROB_SCALE


def test_tokens_that_round_to_nothing_are_left_out() -> None:
    logits = torch.tensor([[0.0, -20.0, -1.0]])
    [(_, row)] = draft_tokens(logits, [SAMPLED], [0], generator(), vocab_size=3)
    assert row is not None
    assert row.token_ids == (0, 2)


def test_tokens_are_drawn_from_exactly_their_row() -> None:
    logits = random_logits(1, 8).expand(100_000, 8)
    drafted = draft_tokens(logits, [SAMPLED] * 100_000, [0] * 100_000, generator(), vocab_size=8, top_n=5)
    row = drafted[0][1]
    assert row is not None
    assert all(other == row for _, other in drafted)
    assert_law(np.bincount([token_id for token_id, _ in drafted], minlength=8), as_law(row, 8))


def test_rows_of_every_kind_share_a_batch() -> None:
    logits = random_logits(6, 16)
    kinds = [SAMPLED, GREEDY, SEEDED, SAMPLED, SEEDED, GREEDY]
    drafted = draft_tokens(logits, kinds, range(6), generator(), vocab_size=16)
    assert [row is None for _, row in drafted] == [False, True, True, False, True, True]
    for index in (1, 2, 4, 5):
        alone = draft_tokens(logits[index : index + 1], [kinds[index]], [index], generator(), vocab_size=16)
        assert alone == [drafted[index]]
    assert drafted == draft_tokens(logits, kinds, range(6), generator(), vocab_size=16)
    assert draft_tokens(logits[:0], [], [], generator(), vocab_size=16) == []


# --- siblings ---


def children_of(logits: torch.Tensor, sampling: DraftSampling, num_children: int, **options) -> list[Children]:
    num_rows, vocab_size = logits.shape
    rows = [sampling] * num_rows
    return draft_children(
        logits, rows, range(num_rows), generator(), vocab_size=vocab_size, num_children=num_children, **options
    )


def test_seeded_siblings_are_ranked_under_the_targets_noise() -> None:
    logits = random_logits(50, 40)
    scores = target_probs(logits, [SEEDED] * 50).double().log2() + gumbel_noise(11, 2, torch.arange(50), 40, "cpu") / (
        1 << 36
    )
    shares = torch.softmax(scores * np.log(2), dim=1)
    for num_children in (1, 3):
        for row, found in enumerate(children_of(logits, SEEDED, num_children)):
            best = shares[row].topk(num_children)
            assert found.token_ids == tuple(best.indices.tolist())
            assert found.probs == pytest.approx(best.values.tolist(), rel=1e-6)
    firsts = [(found.token_ids[0], None) for found in children_of(logits, SEEDED, 3)]
    assert firsts == draft_tokens(logits, [SEEDED] * 50, range(50), generator(), vocab_size=40)


def test_seeded_siblings_are_possible_tokens() -> None:
    shape = DraftSampling(temperature=1.0, seed=3, top_k=2)
    for found in children_of(random_logits(30, 12), shape, 4):
        assert len(found.token_ids) == 2
        assert sum(found.probs) == pytest.approx(1.0)


@pytest.mark.parametrize("sampled", [False, True])
def test_siblings_stop_where_the_vocabulary_does(sampled: bool) -> None:
    for sampling in (GREEDY, SAMPLED, SEEDED):
        [found] = children_of(torch.zeros(1, 3), sampling, 5, sampled=sampled)
        assert sorted(found.token_ids) == [0, 1, 2]


def test_drawn_siblings_follow_the_law_of_draws_without_replacement() -> None:
    num_draws = 60_000
    logits = torch.tensor([[2.0, 0.0, 1.0, 0.5]])
    drawn = children_of(logits.expand(num_draws, 4), SAMPLED, 2, sampled=True)
    row = drawn[0].row
    assert row is not None
    assert all(other.row == row for other in drawn)
    law = as_law(row, 4)
    pairs = law[:, None] * law[None, :] / (1 - law[:, None])
    np.fill_diagonal(pairs, 0.0)
    counts = np.zeros((4, 4))
    np.add.at(counts, tuple(np.array([found.token_ids for found in drawn]).T), 1)
    assert_law(counts, pairs)


def test_what_is_said_of_drawn_siblings_does_not_depend_on_the_draw() -> None:
    """Else the choice of what is verified would look at the drawn tokens, and the law would be lost."""
    peaked = torch.tensor([[20.0, 2.0, 1.0, -30.0]])
    drawn = children_of(peaked.expand(500, 4), DraftSampling(temperature=3.0), 4, sampled=True)
    assert len({found.token_ids for found in drawn}) > 1
    assert len({found.probs for found in drawn}) == 1
    assert len(drawn[0].token_ids) == len(drawn[0].row.token_ids) == 3, "the fourth rounds to nothing"
    assert drawn[0].probs == tuple(weight / DRAFT_PROB_SCALE for weight in drawn[0].row.weights)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "sampling",
    [DraftSampling(temperature=0.0), DraftSampling(temperature=0.8), DraftSampling(temperature=0.8, seed=3)],
    ids=["greedy", "drawn", "seeded"],
)
def test_a_model_that_overflows_makes_a_bad_guess_and_nothing_worse(sampling: DraftSampling, value: float) -> None:
    logits = random_logits(2, 8)
    logits[0] = value
    logits[1, 3] = value
    logits[1, 5] = float("-inf")
    for children in draft_children(logits, [sampling] * 2, [4, 4], generator(), vocab_size=8, num_children=3):
        assert all(0 <= token_id < 8 for token_id in children.token_ids)
        assert all(0.0 <= prob <= 1.0 for prob in children.probs)
    (_, spoilt) = draft_children(logits, [sampling] * 2, [4, 4], generator(), vocab_size=8, num_children=8)
    assert 5 not in spoilt.token_ids[:7], "what a model says is impossible comes last, if at all"


# --- on a device ---

KINDS = (
    SAMPLED,
    SEEDED,
    GREEDY,
    DraftSampling(temperature=1.0, top_p=0.7),
    DraftSampling(temperature=1.0, top_k=4, seed=3),
)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("num_children", [1, 3])
def test_nothing_waits_for_the_device_until_one_copy_comes_back(num_children: int, sampled: bool):
    logits = torch.randn(10, 3000, generator=generator())
    options = {"vocab_size": 2900, "num_children": num_children, "sampled": sampled}
    arguments = (logits, KINDS * 2, range(10))
    expected = draft_children(*arguments, generator(), **options)
    with HostReads() as reads:
        found = launch_children(*arguments, generator(), **options)
    assert set(reads.names) <= {"numpy"}, "of the tickets, which are drawn on the host"
    with HostReads() as reads:
        children = read_children(found)
    assert children == expected
    assert set(reads.names) == {"tolist"}, "of the copy, which lies on the host"
    assert len(copied_shapes(found)) == 1


def copied_shapes(found: Sequence[ChildrenOnDevice]) -> list[torch.Size]:
    """Return the shapes of what is copied back to read some children."""
    shapes: list[torch.Size] = []

    class Noting(CopyBack):
        def __init__(self, values: torch.Tensor) -> None:
            shapes.append(values.shape)
            super().__init__(values)

    read_children(found, Noting)
    return shapes
