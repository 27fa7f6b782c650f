"""From logits to the law that plain sampling draws from, and from a law and a uniform number to a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

NUCLEUS_CANDIDATES = 1024  # top_p alone looks at so many tokens first; a flatter row is sorted whole
_ID_BITS = 32


class SamplingShape(Protocol):
    """How a request reshapes its law; `SamplingParams` and `DraftSampling` both fit."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


def target_probs(logits: torch.Tensor, sampling: Sequence[SamplingShape]) -> torch.Tensor:
    """Return the law of each row under its own shape: float32 [num_rows, vocab_size], rows sum to 1.

    logits float32 [num_rows, vocab_size]; temperatures are above zero (greedy rows are not sampled). Truncations apply
    in the order of transformers' `generate`: temperature, top_k, top_p, min_p, each over what the one before left.
    Equal logits rank by id, lowest first: top_k keeps exactly k tokens and the result is deterministic (transformers
    keeps every tie). Rows that truncate nothing are not sorted.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    assert logits.shape[0] == len(sampling), (logits.shape, len(sampling))
    assert all(shape.temperature > 0.0 for shape in sampling), "greedy rows have no law to sample from"
    scaled = logits / _column([shape.temperature for shape in sampling], logits)  # [num_rows, vocab_size]
    ranked = [_needs_ranking(shape, logits.shape[1]) for shape in sampling]
    if not any(ranked):
        return _unranked_probs(scaled, sampling)
    if all(ranked):
        return _ranked_probs(scaled, sampling)
    probs = torch.empty_like(scaled)
    for law, wanted in ((_unranked_probs, False), (_ranked_probs, True)):
        rows = [row for row, is_ranked in enumerate(ranked) if is_ranked == wanted]
        index = torch.tensor(rows, device=logits.device)
        probs.index_copy_(0, index, law(scaled.index_select(0, index), [sampling[row] for row in rows]))
    return probs


def top_candidates(values: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of each row and their ids, descending, equal values by ascending id.

    values float32 [num_rows, vocab_size] -> values and ids (int64), both [num_rows, num_candidates].
    """
    assert (values.dtype, values.ndim) == (torch.float32, 2), (values.dtype, values.shape)
    if num_candidates >= values.shape[1]:
        ordered = torch.sort(values, dim=1, descending=True, stable=True)
        return ordered.values, ordered.indices
    # torch.topk breaks ties as it likes, so each key is made unique: the float's bits in integer order, then the id
    bits = (values + 0.0).view(torch.int32)  # + 0.0: no negative zero
    ordered_bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    last_id = values.shape[1] - 1
    keys = (ordered_bits << _ID_BITS) | torch.arange(last_id, -1, -1, device=values.device)
    best = torch.topk(keys, num_candidates, dim=1).values
    ids = last_id - (best & ((1 << _ID_BITS) - 1))
    return values.gather(1, ids), ids


def choose(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return one id per row with probability proportional to its weight, never one of weight 0: int64 [num_rows].

    weights float64 [num_rows, vocab_size], not negative, each row with a positive sum; uniforms float64 [num_rows] in
    [0, 1).
    """
    assert (weights.dtype, weights.ndim) == (torch.float64, 2), (weights.dtype, weights.shape)
    assert uniforms.shape == weights.shape[:1], (uniforms.shape, weights.shape)
    cumulative = weights.cumsum(dim=1)
    reached = (cumulative > uniforms[:, None] * cumulative[:, -1:]) & (weights > 0.0)
    # rounding may put the threshold at the very total (probability about 2^-53): then nothing is reached
    first = reached.to(torch.uint8).argmax(dim=1)
    return torch.where(reached.any(dim=1), first, weights.argmax(dim=1))


def _needs_ranking(shape: SamplingShape, vocab_size: int) -> bool:
    return 0 < shape.top_k < vocab_size or shape.top_p < 1.0


def _column(values: Sequence[float], like: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]  # [num_rows, 1]


def _unranked_probs(scaled: torch.Tensor, sampling: Sequence[SamplingShape]) -> torch.Tensor:
    probs = torch.softmax(scaled, dim=1)
    if any(shape.min_p > 0.0 for shape in sampling):
        floor = _column([shape.min_p for shape in sampling], probs) * probs.amax(dim=1, keepdim=True)
        probs.masked_fill_(probs < floor, 0.0)
        probs /= probs.sum(dim=1, keepdim=True, dtype=torch.float64)
    return probs


def _ranked_probs(scaled: torch.Tensor, sampling: Sequence[SamplingShape]) -> torch.Tensor:
    vocab_size = scaled.shape[1]
    num_kept = [shape.top_k if 0 < shape.top_k < vocab_size else vocab_size for shape in sampling]
    num_candidates = max(kept if kept < vocab_size else min(NUCLEUS_CANDIDATES, vocab_size) for kept in num_kept)
    probs, is_covered = _nucleus_probs(scaled, sampling, num_kept, num_candidates)
    # top_k's rows are covered whatever they hold: to ask would wait for the device
    if max(num_kept) > num_candidates and not is_covered.all():
        rows = (~is_covered).nonzero()[:, 0]
        flat = rows.tolist()
        again, _ = _nucleus_probs(
            scaled.index_select(0, rows), [sampling[row] for row in flat], [num_kept[row] for row in flat], vocab_size
        )
        probs.index_copy_(0, rows, again)
    return probs


def _nucleus_probs(
    scaled: torch.Tensor, sampling: Sequence[SamplingShape], num_kept: Sequence[int], num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncate among the best `num_candidates`; also say per row whether those contain its whole nucleus."""
    vocab_size = scaled.shape[1]
    values, ids = top_candidates(scaled, num_candidates)  # [num_rows, num_candidates]
    kept = _column(num_kept, scaled, torch.int64)
    ranks = torch.arange(num_candidates, device=scaled.device)
    values = values.double().masked_fill_(ranks >= kept, float("-inf"))
    log_total = values.logsumexp(dim=1, keepdim=True)
    if num_candidates < vocab_size and max(num_kept) == vocab_size:
        log_total = torch.where(kept < vocab_size, log_total, scaled.double().logsumexp(dim=1, keepdim=True))
    candidates = (values - log_total).exp_()  # float64 [num_rows, num_candidates]
    cumulative = candidates.cumsum(dim=1)
    top_p = _column([shape.top_p for shape in sampling], scaled, torch.float64)
    min_p = _column([shape.min_p for shape in sampling], scaled, torch.float64)
    is_covered = (kept <= num_candidates) | (cumulative[:, -1:] >= top_p)
    # the smallest set that reaches top_p: a token stays while what ranks above it falls short
    stays = (cumulative - candidates < top_p) | (top_p >= 1.0)
    stays &= candidates >= min_p * candidates[:, :1]
    candidates *= stays
    candidates /= candidates.sum(dim=1, keepdim=True)
    return torch.zeros_like(scaled).scatter_(1, ids, candidates.float()), is_covered[:, 0]
