"""From logits to the law that plain sampling draws from; from a law and a uniform number to a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload, upload_rows

NUCLEUS_CANDIDATES = 1024  # how many tokens top_p alone ranks first; a nucleus that outgrows them needs a whole sort
_ID_BITS = 32
Bits = TypeVar("Bits", np.ndarray, torch.Tensor)  # int32


class SamplingShape(Protocol):
    """How a request shapes its law: `SamplingParams` or `DraftSampling`."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...


@dataclass(frozen=True, slots=True)
class _PlainRows:
    """Rows that are not ranked."""

    rows: torch.Tensor | None  # int64 [num_shaped]; None: all
    min_p: torch.Tensor | None  # float32 [num_shaped, 1]; None: no row has one

    @classmethod
    def of(cls, is_own: np.ndarray, min_p: np.ndarray, device: torch.device) -> _PlainRows:
        """All arrays [num_rows]."""
        min_p = min_p[is_own]
        column = upload([_column(min_p, np.float32)], device)[0] if min_p.any() else None
        return cls(_index(is_own, device), column)

    @property
    def is_sure(self) -> bool:
        return True

    def probs(self, scaled: torch.Tensor) -> tuple[torch.Tensor, None]:
        probs = torch.softmax(scaled, dim=1)
        if self.min_p is not None:
            floor = self.min_p * probs.amax(dim=1, keepdim=True)
            probs.masked_fill_(probs < floor, 0.0)
            probs /= probs.sum(dim=1, keepdim=True, dtype=torch.float64)
        return probs, None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankedRows:
    """Rows that are truncated by rank (top_k) or by the probability of the tokens above (top_p)."""

    rows: torch.Tensor | None  # int64 [num_shaped]; None: all
    num_kept: torch.Tensor  # int64 [num_shaped, 1]
    top_p: torch.Tensor  # float64 [num_shaped, 1]
    min_p: torch.Tensor  # float64 [num_shaped, 1]
    num_candidates: int  # how many of the likeliest tokens are ranked
    most_kept: int  # how many tokens one row may keep, at most

    @classmethod
    def of(
        cls,
        is_own: np.ndarray,
        num_kept: np.ndarray,
        top_p: np.ndarray,
        min_p: np.ndarray,
        nucleus: int,
        vocab_size: int,
        device: torch.device,
    ) -> _RankedRows:
        """All arrays [num_rows]; `nucleus`: how many tokens are ranked for a row without top_k."""
        num_kept = num_kept[is_own]
        columns = [_column(num_kept, np.int64), *(_column(each[is_own], np.float64) for each in (top_p, min_p))]
        sent_kept, sent_top_p, sent_min_p = upload(columns, device)
        return cls(
            rows=_index(is_own, device),
            num_kept=sent_kept,
            top_p=sent_top_p,
            min_p=sent_min_p,
            num_candidates=int(np.where(num_kept < vocab_size, num_kept, nucleus).max()),
            most_kept=int(num_kept.max()),
        )

    @property
    def is_sure(self) -> bool:
        """Whether no row may have a nucleus of more tokens than are ranked."""
        return self.most_kept <= self.num_candidates

    def probs(self, scaled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Truncate among the candidates; unless sure, also say per row whether they contain its whole nucleus.

        A row with top_k counts as covered, whatever it holds.
        """
        vocab_size, num_candidates, kept = scaled.shape[1], self.num_candidates, self.num_kept
        values, ids = top_candidates(scaled, num_candidates)  # [num_rows, num_candidates]
        ranks = torch.arange(num_candidates, device=scaled.device)
        values = values.double().masked_fill_(ranks >= kept, float("-inf"))
        log_total = values.logsumexp(dim=1, keepdim=True)
        if num_candidates < vocab_size and self.most_kept == vocab_size:
            log_total = torch.where(kept < vocab_size, log_total, scaled.double().logsumexp(dim=1, keepdim=True))
        candidates = (values - log_total).exp_()  # float64 [num_rows, num_candidates]
        cumulative = candidates.cumsum(dim=1)
        is_covered = (kept <= num_candidates) | (cumulative[:, -1:] >= self.top_p)
        # the smallest set that reaches top_p: a token stays while what ranks above it falls short
        stays = (cumulative - candidates < self.top_p) | (self.top_p >= 1.0)
        stays &= candidates >= self.min_p * candidates[:, :1]
        candidates *= stays
        candidates /= candidates.sum(dim=1, keepdim=True)
        probs = torch.zeros_like(scaled).scatter_(1, ids, candidates.float())
        return probs, None if self.is_sure else is_covered[:, 0]


@dataclass(frozen=True, slots=True)
class LawShapes:
    """How rows of logits become laws; sent to the logits' device before the logits are there.

    A law is what plain sampling draws from. Truncations apply in the order of transformers' `generate`: temperature,
    top_k, top_p, min_p, each over what the one before left. Equal logits rank by id, lowest first, so top_k keeps
    exactly k tokens (transformers keeps every tie). Rows that truncate nothing are not ranked.
    """

    num_rows: int
    temperatures: torch.Tensor | None  # float32 [num_rows, 1]; None: all are 1
    groups: tuple[_PlainRows | _RankedRows, ...]  # each row is in one

    @classmethod
    def of(
        cls,
        sampling: Sequence[SamplingShape],
        vocab_size: int,
        device: torch.device,
        *,
        counts: Sequence[int] | None = None,
        ranks_all: bool = False,
    ) -> LawShapes:
        """Take one shape for `counts` rows each (None: one), with a temperature above zero: greedy rows have no law.

        A row with top_p alone ranks its NUCLEUS_CANDIDATES likeliest tokens; `ranks_all`: the whole vocabulary.
        """
        assert all(shape.temperature > 0.0 for shape in sampling), "greedy rows have no law to sample from"
        owners = np.repeat(np.arange(len(sampling)), 1 if counts is None else counts)  # the shape of each row
        numbers = [(shape.temperature, shape.top_k, shape.top_p, shape.min_p) for shape in sampling]
        temperatures, top_k, top_p, min_p = np.array(numbers, np.float64).reshape(-1, 4)[owners].T
        cuts = (top_k > 0) & (top_k < vocab_size)
        is_ranked = cuts | (top_p < 1.0)
        groups: list[_PlainRows | _RankedRows] = []
        if not is_ranked.all():
            groups.append(_PlainRows.of(~is_ranked, min_p, device))
        if is_ranked.any():
            nucleus = vocab_size if ranks_all else min(NUCLEUS_CANDIDATES, vocab_size)
            num_kept = np.where(cuts, top_k, vocab_size).astype(np.int64)
            groups.append(_RankedRows.of(is_ranked, num_kept, top_p, min_p, nucleus, vocab_size, device))
        is_plain = bool((temperatures == 1.0).all())
        sent = None if is_plain else upload([_column(temperatures, np.float32)], device)[0]
        return cls(len(owners), sent, tuple(groups))

    @property
    def are_sure(self) -> bool:
        """Whether `probs` is right for every row, whatever the logits are."""
        return all(group.is_sure for group in self.groups)

    def probs(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the laws, without waiting for the device, and which rows are right; None where `are_sure`.

        logits float32 [num_rows, vocab_size] -> float32 [num_rows, vocab_size], rows sum to 1, and bool [num_rows].
        A row is wrong if its nucleus outgrows its candidates. It is right with `ranks_all`.
        """
        assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
        assert len(logits) == self.num_rows, (logits.shape, self.num_rows)
        scaled = logits if self.temperatures is None else logits / self.temperatures
        if len(self.groups) == 1:
            return self.groups[0].probs(scaled)
        probs = torch.empty_like(scaled)
        is_right = None if self.are_sure else torch.ones(len(scaled), dtype=torch.bool, device=scaled.device)
        for group in self.groups:
            assert group.rows is not None, "one of several groups has all rows"
            own, is_covered = group.probs(scaled.index_select(0, group.rows))
            probs.index_copy_(0, group.rows, own)
            if is_right is not None and is_covered is not None:
                is_right.index_copy_(0, group.rows, is_covered)
        return probs, is_right


def log_laws(logits: torch.Tensor, sampling: Sequence[SamplingShape]) -> torch.Tensor:
    """Return the logarithms of each row's law, -inf where a truncation leaves nothing; it may wait for the device.

    logits float32 [num_rows, vocab_size] -> float32 [num_rows, vocab_size].
    """
    (temperatures,) = upload([_column([shape.temperature for shape in sampling], np.float32)], logits.device)
    scaled = logits / temperatures
    truncated = [row for row, shape in enumerate(sampling) if shape.top_k > 0 or shape.top_p < 1.0 or shape.min_p > 0.0]
    if truncated:
        rows = upload_rows(truncated, logits.device)
        laws = _laws(logits.index_select(0, rows), [sampling[row] for row in truncated])
        scaled.index_copy_(0, rows, scaled.index_select(0, rows).masked_fill_(laws == 0.0, float("-inf")))
    return torch.log_softmax(scaled, dim=1)


def _laws(logits: torch.Tensor, sampling: Sequence[SamplingShape]) -> torch.Tensor:
    """Return what `LawShapes.probs` does, with the rows that were wrong ranked anew, as verification does."""
    vocab_size, device = logits.shape[1], logits.device
    probs, is_right = LawShapes.of(sampling, vocab_size, device).probs(logits)
    wrong = [] if is_right is None else (~is_right).nonzero()[:, 0].tolist()
    if wrong:
        rows = upload_rows(wrong, device)
        whole = LawShapes.of([sampling[row] for row in wrong], vocab_size, device, ranks_all=True)
        probs.index_copy_(0, rows, whole.probs(logits.index_select(0, rows))[0])
    return probs


def _index(is_own: np.ndarray, device: torch.device) -> torch.Tensor | None:
    return None if is_own.all() else upload([is_own.nonzero()[0]], device)[0]


def top_candidates(values: torch.Tensor, num_candidates: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of each row and their ids, descending, equal values by ascending id.

    values float32 [num_rows, vocab_size] -> values and ids (int64), both [num_rows, num_candidates].
    """
    assert (values.dtype, values.ndim) == (torch.float32, 2), (values.dtype, values.shape)
    ids: torch.Tensor = torch.ops.outrider.top_ids(values, num_candidates)
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
    # rounding may put the threshold at the total (probability about 2^-53): then no token reaches it
    first = first_largest(reached)
    return torch.where(reached.gather(1, first[:, None])[:, 0], first, first_largest(weights))


def first_largest(values: torch.Tensor) -> torch.Tensor:
    """Return where each row's first largest number is: [num_rows, num_columns] of any type but bfloat16 -> int64."""
    found: torch.Tensor = torch.ops.outrider.first_largest(values)
    return found


def _column(values: np.ndarray | Sequence[float], dtype: type[np.generic]) -> np.ndarray:
    return np.array(values).astype(dtype).reshape(-1, 1)


# Operators of torch's, so that a device's step, captured or played, sees one operation whatever is behind it. On a CPU
# numpy's vector instructions take a sixth of torch's time.


def _first_largest_on_cpu(values: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.from_dlpack(values).argmax(axis=1))


def _first_largest_on_device(values: torch.Tensor) -> torch.Tensor:
    return (values.to(torch.uint8) if values.dtype is torch.bool else values).argmax(dim=1)


def _in_order(bits: Bits) -> Bits:
    """Return the bits of floats as integers that are in the floats' order."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _top_ids_on_cpu(values: torch.Tensor, num_wanted: int) -> torch.Tensor:
    rows, last_id = np.from_dlpack(values), values.shape[1] - 1
    least = None if num_wanted > last_id else np.partition(rows, -num_wanted, axis=1)[:, -num_wanted]
    found = np.empty((len(rows), min(num_wanted, last_id + 1)), np.int64)
    for place, row in enumerate(rows):
        # of those as large as the last one there may be more than are wanted; NaN is less than nothing
        ids = np.arange(last_id + 1) if least is None else np.flatnonzero(~(row < least[place]))
        bits = (row[ids] + np.float32(0.0)).view(np.int32)
        keys = np.sort(_in_order(bits).astype(np.int64) << _ID_BITS | (last_id - ids))
        found[place] = last_id - (keys[::-1][:num_wanted] & ((1 << _ID_BITS) - 1))
    return torch.from_numpy(found)


def _top_ids_on_device(values: torch.Tensor, num_wanted: int) -> torch.Tensor:
    last_id = values.shape[1] - 1
    if num_wanted > last_id:
        return torch.sort(values, dim=1, descending=True, stable=True).indices
    # torch.topk breaks ties as it likes, so each key is made unique: the float's bits in integer order, then the id
    bits = (values + 0.0).view(torch.int32)  # + 0.0: no negative zero
    keys = (_in_order(bits).to(torch.int64) << _ID_BITS) | torch.arange(last_id, -1, -1, device=values.device)
    return last_id - (torch.topk(keys, num_wanted, dim=1).values & ((1 << _ID_BITS) - 1))


_LIBRARY = torch.library.Library("outrider", "FRAGMENT")
_LIBRARY.define("first_largest(Tensor values) -> Tensor")
_LIBRARY.define("top_ids(Tensor values, int num_wanted) -> Tensor")
_LIBRARY.impl("first_largest", _first_largest_on_cpu, "CPU")
_LIBRARY.impl("first_largest", _first_largest_on_device, "CUDA")
_LIBRARY.impl("top_ids", _top_ids_on_cpu, "CPU")
_LIBRARY.impl("top_ids", _top_ids_on_device, "CUDA")
