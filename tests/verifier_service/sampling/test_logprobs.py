"""Log probabilities against plain log_softmax and laws by hand, and only of the rows asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.stats
import torch

from outrider.verifier_service.messages.request import (
    LOWEST_LOGPROB,
    AcceptanceRule,
    LogprobsMode,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.logits_processors import LogitEdits
from outrider.verifier_service.sampling.logprobs import (
    LogprobsQuery,
    encoded_bytes,
    shape_of_logprobs,
    token_logprobs,
)
from outrider.verifier_service.sampling.sampler import NUCLEUS_CANDIDATES
from tiny.played_graphs import HostReads
from tiny.verified import target_probs, verify

SHAPES = [
    {"temperature": 0.7},
    {"temperature": 1.4, "top_k": 5},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.2, "min_p": 0.1},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


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


# --- processed ---

PROCESSED = SamplingParams(logprobs_mode=LogprobsMode.PROCESSED)
FOURTHS = torch.tensor([[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]]).log()


def law_of(logits: torch.Tensor, sampling: SamplingParams, edits: LogitEdits | None = None) -> torch.Tensor:
    """Return exp of the log probabilities of the whole vocabulary, listed as alternatives: float64 [num_rows, ids]."""
    num_rows, num_ids = logits.shape
    shape = shape_of_logprobs(sampling)
    query = LogprobsQuery(rows=range(num_rows), token_ids=[0] * num_rows, num_top=num_ids, shape=shape, edits=edits)
    law = torch.zeros(num_rows, num_ids, dtype=torch.float64)
    for row, entry in enumerate(token_logprobs(logits, [query])[0]):
        assert entry.logprob == dict(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[0]
        assert all(LOWEST_LOGPROB <= logprob <= 0.0 for logprob in entry.top_logprobs)
        law[row, list(entry.top_token_ids)] = torch.tensor(entry.top_logprobs, dtype=torch.float64).exp()
    return law


@pytest.mark.parametrize(
    ("shape", "laws"),
    [
        ({}, [[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]]),
        ({"temperature": 0.5}, [[16 / 30, 1 / 30, 9 / 30, 4 / 30], [1 / 30, 4 / 30, 9 / 30, 16 / 30]]),
        ({"top_k": 2}, [[4 / 7, 0, 3 / 7, 0], [0, 0, 3 / 7, 4 / 7]]),
        ({"top_p": 0.75}, [[4 / 9, 0, 3 / 9, 2 / 9], [0, 2 / 9, 3 / 9, 4 / 9]]),
        ({"min_p": 0.3}, [[4 / 9, 0, 3 / 9, 2 / 9], [0, 2 / 9, 3 / 9, 4 / 9]]),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.6}, [[16 / 25, 0, 9 / 25, 0], [0, 0, 9 / 25, 16 / 25]]),
        ({"temperature": 0.0, "top_k": 2, "top_p": 0.1}, [[0.4, 0.1, 0.3, 0.2], [0.1, 0.2, 0.3, 0.4]]),
    ],
)
def test_a_law_by_hand(shape, laws):
    """Greedy: the model's own law, as in vLLM."""
    found = law_of(FOURTHS, replace(PROCESSED, **shape))
    torch.testing.assert_close(found, torch.tensor(laws, dtype=torch.float64), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_edits_by_hand(temperature):
    """A bias of log 2 on token 1, token 2 barred, token 3 penalised; in the second row the grammar bars token 0."""
    edits = LogitEdits(
        token_ids=np.array([1, 2, 3]),
        biases=np.array([[math.log(2), -np.inf, 0.0]] * 2, np.float32),
        divisors=np.array([[1.0, 1.0, 2.0]] * 2, np.float32),  # multiplies negative logits: squares the weights
        penalties=np.array([[0.0, 0.0, math.log(0.5)]] * 2, np.float32),
        allowed=np.array([[0b1111], [0b1110]], np.uint8),
    )
    weights = torch.tensor([[0.4, 0.2, 0.0, 0.08], [0.0, 0.4, 0.0, 0.32]], dtype=torch.float64)
    weights **= 1.0 / (temperature or 1.0)
    found = law_of(FOURTHS, replace(PROCESSED, temperature=temperature), edits)
    torch.testing.assert_close(found, weights / weights.sum(dim=1, keepdim=True), atol=1e-6, rtol=0.0)
    torch.testing.assert_close(
        law_of(FOURTHS[1:], PROCESSED, edits.of_rows([1]))[0], law_of(FOURTHS, PROCESSED, edits)[1]
    )


@pytest.mark.parametrize("sampling", SHAPES)
def test_the_law_of_the_whole_vocabulary_sums_to_1_and_is_the_one_that_tokens_are_drawn_from(sampling):
    logits = 3.0 * torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    law = law_of(logits, replace(PROCESSED, **sampling))
    assert law.sum(dim=1).tolist() == pytest.approx([1.0] * 40, abs=1e-6)
    drawn_from = target_probs(logits, [replace(PROCESSED, **sampling)] * 40)
    torch.testing.assert_close(law, drawn_from.double(), atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("sampling", SHAPES)
def test_draws_follow_what_is_reported(sampling):
    """Pearson's chi-square of 20,000 draws at alpha 1e-6; the law at another temperature is rejected."""
    num_draws, shape = 20_000, replace(PROCESSED, **sampling)
    logits = torch.randn(1, 8, generator=torch.Generator().manual_seed(4))
    entries = [VerificationEntry(sampling=shape, draft=None, position=3)] * num_draws
    drawn = verify(logits.expand(num_draws, -1).contiguous(), entries, torch.Generator().manual_seed(5))
    counts = np.bincount([tokens.token_ids[0] for tokens in drawn], minlength=8)
    assert p_value(counts, law_of(logits, shape)[0].numpy()) > 1e-6
    assert p_value(counts, law_of(logits, replace(shape, temperature=shape.temperature * 1.3))[0].numpy()) < 1e-6


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    expected = law * counts.sum()
    likely = expected > 1e-9
    if counts[~likely].any():
        return 0.0
    return float(scipy.stats.chisquare(counts[likely], expected[likely], sum_check=False).pvalue)


@pytest.mark.parametrize("sampling", SHAPES)
def test_a_drafts_rows_are_those_of_plain_steps(sampling):
    """The same logits, a step each or one step for all: the numbers are the same to 1e-6, and beside raw ones."""
    logits = 3.0 * torch.randn(12, 200, generator=torch.Generator().manual_seed(6))
    shape = replace(PROCESSED, **sampling)
    path, ids = (3, 4, 7, 11), (5, 6, 7, 8)  # rows of a tree
    raw = LogprobsQuery(rows=(0, 3), token_ids=(1, 2), num_top=3)
    drafted = LogprobsQuery(rows=path, token_ids=ids, num_top=20, shape=shape)
    found_raw, found = token_logprobs(logits, [raw, drafted])
    assert found_raw == token_logprobs(logits, [raw])[0]
    for row, token_id, entry in zip(path, ids, found, strict=True):
        query = LogprobsQuery(rows=(0,), token_ids=(token_id,), num_top=20, shape=shape)
        ((plain,),) = token_logprobs(logits[row : row + 1], [query])
        assert plain.top_token_ids == entry.top_token_ids
        assert (plain.logprob, *plain.top_logprobs) == pytest.approx((entry.logprob, *entry.top_logprobs), abs=1e-6)


def test_a_nucleus_that_outgrows_its_candidates_is_ranked_anew():
    logits = torch.zeros(2, 4 * NUCLEUS_CANDIDATES)
    logits[1, 7] = 20.0
    query = LogprobsQuery(rows=(0, 1), token_ids=(2500, 7), num_top=1, shape=replace(PROCESSED, top_p=0.75))
    flat, peaked = token_logprobs(logits, [query])[0]
    assert flat.logprob == pytest.approx(-math.log(3 * NUCLEUS_CANDIDATES), abs=1e-5)
    assert peaked.logprob == 0.0


def test_unlikely_tokens_of_a_cold_law_stay_apart():
    """Their probabilities are 0 in float32, their logarithms are not: only truncation makes them the lowest."""
    logits = torch.tensor([[0.0, -20.0, -30.0]])
    cold = replace(PROCESSED, temperature=0.1)
    for shape, expected in (
        (cold, (0.0, -200.0, -300.0)),
        (replace(cold, top_k=2), (0.0, LOWEST_LOGPROB, LOWEST_LOGPROB)),
    ):
        ((entry,),) = token_logprobs(logits, [LogprobsQuery(rows=(0,), token_ids=(0,), num_top=3, shape=shape)])
        assert entry.top_logprobs == pytest.approx(expected)


def test_lossy_acceptance_has_no_processed_logprobs():
    with pytest.raises(ValueError, match=r"^logprobs_mode must be raw_logprobs with rejection_sample_method typical"):
        replace(PROCESSED, acceptance=AcceptanceRule.TYPICAL)
    assert [rule for rule in AcceptanceRule if rule.is_lossy] == [AcceptanceRule.TYPICAL]
    assert replace(PROCESSED, acceptance=AcceptanceRule.BLOCK).logprobs_mode is LogprobsMode.PROCESSED
