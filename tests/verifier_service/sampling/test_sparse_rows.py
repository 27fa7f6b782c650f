"""Laws as integer rows: their sums, their order, and what is left out."""

from __future__ import annotations

import torch

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, SparseRow
from outrider.verifier_service.sampling.sparse_rows import likeliest_rows, quantised_rows, sparse_row


def test_quantised_by_hand() -> None:
    third = torch.tensor([[1 / 3, 1 / 3, 1 / 3, 0.0], [1 - 2**-20, 2**-20, 0.0, 0.0]])
    ids, weights = quantised_rows(third, top_n=4)
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert weights.tolist() == [[21846, 21845, 21845, 0], [65536, 0, 0, 0]]


def test_what_rounds_to_nothing_is_left_out() -> None:
    assert sparse_row((4, 2, 9), (65535, 1, 0)) == SparseRow(token_ids=(4, 2), weights=(65535, 1))


def test_the_likeliest_by_hand() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -100.0], [0.5, 0.5, 0.5, 0.5], [1000.0, 0.0, -1000.0, 0.0]])
    e = 2.718281828459045
    assert likeliest_rows(logits, 2) == [
        SparseRow(token_ids=(1, 2), weights=(round(DRAFT_PROB_SCALE * e / (e + 1)), round(DRAFT_PROB_SCALE / (e + 1)))),
        SparseRow(token_ids=(0, 1), weights=(32768, 32768)),
        SparseRow(token_ids=(0,), weights=(65536,)),
    ]


def test_rows_sum_exactly_and_have_unique_tokens_of_positive_weight() -> None:
    logits = 4 * torch.randn(200, 50, generator=torch.Generator().manual_seed(3))
    for num_top in (1, 7, 50, 64):
        for row, best in zip(likeliest_rows(logits, num_top), logits.argsort(dim=1, descending=True), strict=True):
            assert sum(row.weights) == DRAFT_PROB_SCALE
            assert min(row.weights) > 0
            assert list(row.token_ids) == best[: len(row.token_ids)].tolist(), "likeliest first"
            assert len(row.token_ids) <= min(num_top, 50)
