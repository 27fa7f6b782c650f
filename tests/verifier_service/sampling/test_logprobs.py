"""Log probabilities against plain log_softmax, and only of the rows asked for."""

from __future__ import annotations

import math

import pytest
import torch

from outrider.verifier_service.messages.request import RequestOutput, TokenLogprobs
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.sampling.logprobs import LogprobsQuery, encoded_bytes, token_logprobs
from tiny.played_graphs import HostReads


def test_one_row_by_hand():
    logits = torch.tensor([[0.0] * 4, [math.log(4), math.log(1), math.log(3), math.log(2)]])
    ((entry,),) = token_logprobs(logits, [LogprobsQuery(rows=(1,), token_ids=(3,), num_top=2)])
    assert (entry.token_id, entry.rank) == (3, 3)
    assert entry.logprob == pytest.approx(math.log(0.2))
    assert entry.top_token_ids == (0, 2)
    assert entry.top_logprobs == pytest.approx((math.log(0.4), math.log(0.3)))


def test_equal_logits_rank_alike_and_stand_by_id():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    queries = [LogprobsQuery(rows=(0,), token_ids=(token_id,), num_top=3) for token_id in range(4)]
    entries = [entry for (entry,) in token_logprobs(logits, queries)]
    assert [entry.rank for entry in entries] == [4, 1, 1, 1]
    assert all(entry.top_token_ids == (1, 2, 3) for entry in entries)


def test_queries_of_different_widths_share_a_step():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits, dim=1)
    queries = [
        LogprobsQuery(rows=(4, 5), token_ids=(8, 0), num_top=0),
        LogprobsQuery(rows=(), token_ids=(), num_top=3),
        LogprobsQuery(rows=(0, 1, 2), token_ids=(1, 2, 3), num_top=20),
    ]
    found = token_logprobs(logits, queries)
    assert [[entry.token_id for entry in entries] for entries in found] == [[8, 0], [], [1, 2, 3]]
    for query, entries in zip(queries, found, strict=True):
        for row, entry in zip(query.rows, entries, strict=True):
            assert entry.logprob == pytest.approx(expected[row, entry.token_id].item(), abs=1e-6)
            assert entry.rank == 1 + (expected[row] > expected[row, entry.token_id]).sum()
            assert entry.top_token_ids == tuple(expected[row].argsort(descending=True)[: query.num_top].tolist())


def test_nothing_asked_is_nothing_computed():
    assert token_logprobs(torch.zeros(0, 4), []) == []
    assert token_logprobs(torch.zeros(1, 4), [LogprobsQuery(rows=(), token_ids=(), num_top=3)]) == [[]]


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_the_bytes_of_entries_are_bounded_tightly(num_top: int):
    ids = tuple(range(1 << 31, (1 << 31) + num_top))
    entry = TokenLogprobs(
        token_id=1 << 31, logprob=-1.0, rank=1 << 17, top_token_ids=ids, top_logprobs=(-1.0,) * num_top
    )
    empty = RequestOutput(request_id="a", token_ids=(), prompt_logprobs=())
    full = RequestOutput(request_id="a", token_ids=(), prompt_logprobs=(entry,) * 1000)
    num_bytes = len(encode(full)) - len(encode(empty))
    assert 0.8 * encoded_bytes(1000, num_top) < num_bytes <= encoded_bytes(1000, num_top)


def test_all_is_read_back_in_one_copy() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(2))
    queries = [
        LogprobsQuery(rows=(0, 1), token_ids=(3, 4), num_top=2),
        LogprobsQuery(rows=(3,), token_ids=(0,), num_top=0),
    ]
    with HostReads() as reads:
        token_logprobs(logits, queries)
    assert [name for name in reads.names if name not in ("numpy", "tolist")] == ["cpu"]
    assert reads.names.index("cpu") < reads.names.index("tolist")
