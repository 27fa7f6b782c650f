"""Draw draft tokens so that the verifier can judge them exactly.

A token drawn at random comes with the sparse integer row that it was drawn from: the row *is* the draft's law, so
truncating and quantising it costs acceptance, never exactness. Greedy and coupled tokens are point masses: ids alone.
Siblings of a tree are drawn from their row one after another without replacement (SpecInfer, Miao et al. 2024), or are
its likeliest tokens as point masses (EAGLE-2, Li et al. 2024).

All is chosen where the logits are, before the host waits for anything: `launch_children` sends what it knows ahead, and
`read_children` reads what was found, in one small copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider.verifier_service.gpu.transfers import CopyBack, upload, upload_rows
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, DraftSampling, SparseRow
from outrider.verifier_service.messages.request import GREEDY_TEMPERATURE
from outrider.verifier_service.sampling.coupled_sampler import (
    NOISE_FRACTION_BITS,
    coupled_choice,
    noise_keys,
    noise_of_keys,
)
from outrider.verifier_service.sampling.sampler import LawShapes, first_largest, top_candidates
from outrider.verifier_service.sampling.sparse_rows import quantised_rows, sparse_row

MAX_LOGIT = 1e30  # finite after any temperature, too
_TICKET_BITS = 62  # a ticket modulo at most 2^16 is uniform to 2^-46, and exactly so for a sibling drawn first


class Children(NamedTuple):
    """Siblings in the order in which they are to be tried."""

    token_ids: tuple[int, ...]
    # the drafter's estimate that each is accepted where its parent is; of drawn ones a function of the row alone
    probs: tuple[float, ...]
    row: SparseRow | None = None  # what they were drawn from; None: point masses


@dataclass(frozen=True, slots=True)
class ChildrenOnDevice:
    """What was found for some rows, where the logits are."""

    rows: Sequence[int]
    numbers: Sequence[torch.Tensor]  # int64 or float64, all [num_rows, some]
    children_of: Callable[..., list[Children]]  # of the numbers, as lists


LIKELIEST, COUPLED, BY_LAW = range(3)  # how a row's tokens are chosen: with a seed under its noise


def choices_of(samplings: Sequence[DraftSampling]) -> npt.NDArray[np.int8]:
    """Return how each row's tokens are chosen: int8 [num_rows]."""
    return np.array(
        [
            LIKELIEST if one.temperature <= GREEDY_TEMPERATURE else BY_LAW if one.seed is None else COUPLED
            for one in samplings
        ],
        np.int8,
    )


def launch_children(
    logits: torch.Tensor,
    samplings: Sequence[DraftSampling],
    positions: Sequence[int],
    rng: torch.Generator,
    *,
    vocab_size: int,
    num_children: int,
    top_n: int = 32,
    sampled: bool = False,
    choices: npt.NDArray[np.int8] | None = None,
) -> list[ChildrenOnDevice]:
    """Choose up to `num_children` tokens per row, fewer only where the row knows no more, and wait for nothing.

    logits float32 [num_rows, draft_vocab_size]; ids from `vocab_size` (the shared vocabulary) on are never proposed.
    `positions` are the absolute positions of the tokens to be chosen: with a seed the choice is made under the same
    noise as the target's own, whose likeliest choice comes first. Without seed and temperature 0 the law's likeliest
    tokens are taken, or, `sampled`, as many are drawn from its `top_n` likeliest without replacement: then `rng` gives
    `num_children` numbers per row, and how many there are depends on the row alone. `choices` are those of the
    samplings, where they are known.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    assert logits.shape[0] == len(samplings) == len(positions), (logits.shape, len(samplings), len(positions))
    assert 1 <= top_n <= DRAFT_PROB_SCALE, top_n
    assert num_children >= 1, num_children
    # a model that overflows makes a bad guess, and nothing worse; -inf alone means what it says: never
    logits = logits[:, :vocab_size].nan_to_num(nan=0.0, neginf=-math.inf).clamp(max=MAX_LOGIT)
    choices = choices_of(samplings) if choices is None else choices
    greedy: Sequence[int] = range(len(samplings))
    seeded: Sequence[int] = ()
    unseeded: Sequence[int] = ()
    if choices.any():
        greedy, seeded, unseeded = (np.flatnonzero(choices == one).tolist() for one in (LIKELIEST, COUPLED, BY_LAW))
    found: list[ChildrenOnDevice] = []
    if greedy:
        numbers = _likeliest(select_rows(logits, greedy), num_children)
        found.append(ChildrenOnDevice(greedy, numbers, _point_masses))
    if seeded:
        at = [positions[row] for row in seeded]
        numbers = _coupled(select_rows(logits, seeded), [samplings[row] for row in seeded], at, num_children)
        found.append(ChildrenOnDevice(seeded, numbers, _point_masses))
    if unseeded:
        probs = _law(select_rows(logits, unseeded), [samplings[row] for row in unseeded])
        if sampled:
            drawn = _draw(*quantised_rows(probs, top_n), rng, num_children)
            found.append(ChildrenOnDevice(unseeded, drawn, _drawn_children))
        else:
            ids, values = _top(probs, num_children)
            found.append(ChildrenOnDevice(unseeded, (ids, values.double()), _point_masses))
    return found


def first_ids(found: Sequence[ChildrenOnDevice]) -> tuple[torch.Tensor, list[int]]:
    """Return the first child of every row where it lies, int64 [num_rows], and where in there each row's is."""
    ids = [one.numbers[0][:, 0].contiguous() for one in found]  # ranks are told them by a broadcast
    if len(ids) == 1:
        return ids[0], list(range(len(ids[0])))
    place_of = {row: place for place, row in enumerate(row for one in found for row in one.rows)}
    return torch.cat(ids), [place_of[row] for row in range(len(place_of))]


class PendingCopy(Protocol):
    """A copy on its way to the host."""

    def wait(self) -> torch.Tensor: ...


ReadBack = Callable[[torch.Tensor], PendingCopy]  # of a tensor on the device; `CopyBack` is one


def read_children(found: Sequence[ChildrenOnDevice], read_back: ReadBack = CopyBack) -> list[Children]:
    """Wait for the device, and return the children of every row, in the rows' order."""
    return read_levels([found], read_back)[0]


def read_levels(levels: Sequence[Sequence[ChildrenOnDevice]], read_back: ReadBack = CopyBack) -> list[list[Children]]:
    """Read what was found for the rows of several levels in one copy."""
    tensors = [tensor for found in levels for one in found for tensor in one.numbers]
    if not tensors:
        return [[] for _ in levels]
    bits = torch.cat([tensor.contiguous().view(torch.int64).flatten() for tensor in tensors])
    parts = iter(read_back(bits).wait().split([tensor.numel() for tensor in tensors]))
    read: list[list[Children]] = []
    for found in levels:
        chosen: dict[int, Children] = {}
        for one in found:
            numbers = [next(parts).view(tensor.dtype).view(tensor.shape).tolist() for tensor in one.numbers]
            chosen |= zip(one.rows, one.children_of(*numbers), strict=True)
        read.append([chosen[row] for row in range(len(chosen))])
    return read


def select_rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Return some rows, in ascending order, without a copy when they are all."""
    return logits if len(rows) == logits.shape[0] else logits.index_select(0, upload_rows(rows, logits.device))


def _law(logits: torch.Tensor, samplings: Sequence[DraftSampling]) -> torch.Tensor:
    """Return the law of each row; a nucleus of more than NUCLEUS_CANDIDATES tokens ends there, for it takes a look."""
    return LawShapes.of(samplings, logits.shape[1], logits.device).probs(logits)[0]


_Found = tuple[torch.Tensor, torch.Tensor]  # ids int64 and chances float64, both [num_rows, num_children]


def _likeliest(logits: torch.Tensor, num_children: int) -> _Found:
    """Take the largest logits of each row, with their probabilities at temperature 1."""
    ids, values = _top(logits, num_children)
    return ids, (values - logits.logsumexp(dim=1, keepdim=True)).exp().double()


def _coupled(
    logits: torch.Tensor, samplings: Sequence[DraftSampling], positions: Sequence[int], num_children: int
) -> _Found:
    """Take the largest log2 probs + noise of each row, the first as the target takes its own.

    What speaks for a child is its lead over the others under this noise, not its probability without it: the estimate
    is its share of the sum of 2^(log2 probs + noise).
    """
    rows = [(sampling.seed, sampling.choice_index, at) for sampling, at in zip(samplings, positions, strict=True)]
    (identities,) = upload([np.array(rows, np.int64).T], logits.device)
    noise = noise_of_keys(noise_keys(*identities.unbind(0)), logits.shape[1])
    probs = _law(logits, samplings)
    first = coupled_choice(probs, noise)[:, None]  # [num_rows, 1]
    scores = noise.double().div_(1 << NOISE_FRACTION_BITS).add_(probs.double().log2_())  # [num_rows, vocab_size]
    shares = scores.sub_(scores.amax(dim=1, keepdim=True)).exp2_()
    shares /= shares.sum(dim=1, keepdim=True)
    if num_children == 1:
        return first, shares.gather(1, first)
    ids, values = _top(shares.float().scatter_(1, first, 2.0), num_children)
    values[:, :1] = shares.gather(1, first)
    return ids, values.double()


def _top(values: torch.Tensor, num_wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids of each row's largest values and those, [num_rows, <= num_wanted] each; equal ones by id."""
    if num_wanted == 1:  # needs no order
        best = first_largest(values)[:, None]
        return best, values.gather(1, best)
    found, ids = top_candidates(values, min(num_wanted, values.shape[1]))
    return ids, found


def _point_masses(ids: Sequence[Sequence[int]], probs: Sequence[Sequence[float]]) -> list[Children]:
    """Make children of each row's ids and chances; impossible ones but a first are left out."""
    children: list[Children] = []
    for row_ids, row_probs in zip(ids, probs, strict=True):
        num_kept = max(1, sum(prob > 0.0 for prob in row_probs)) if len(row_ids) > 1 else 1
        children.append(Children(token_ids=tuple(row_ids[:num_kept]), probs=tuple(row_probs[:num_kept])))
    return children


def _draw(
    ids: torch.Tensor, weights: torch.Tensor, rng: torch.Generator, num_children: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens by their integer weights without replacement: ids, weights int64 [num_rows, num_candidates].

    Returns what was drawn, int64 [num_rows, num_children], and what from; `rng` is of the host.
    """
    tickets = torch.randint(1 << _TICKET_BITS, (len(ids), num_children), generator=rng)
    (sent,) = upload([tickets.numpy()], ids.device)
    left = weights.clone()
    drawn: list[torch.Tensor] = []
    for ticket in sent.split(1, dim=1):
        cumulative = left.cumsum(dim=1)
        ranks = torch.searchsorted(cumulative, ticket % cumulative[:, -1:].clamp(min=1), right=True)
        ranks.clamp_(max=ids.shape[1] - 1)  # nothing is left to draw from: cut off below
        drawn.append(ids.gather(1, ranks))
        left.scatter_(1, ranks, 0)
    return torch.cat(drawn, dim=1), ids, weights


def _drawn_children(
    drawn: Sequence[Sequence[int]], ids: Sequence[Sequence[int]], weights: Sequence[Sequence[int]]
) -> list[Children]:
    """Keep as many as a row has tokens; the estimates are its largest probabilities, whatever was drawn."""
    children: list[Children] = []
    for row_drawn, row_ids, row_weights in zip(drawn, ids, weights, strict=True):
        row = sparse_row(row_ids, row_weights)
        num_kept = min(len(row_drawn), len(row.token_ids))
        probs = tuple(weight / DRAFT_PROB_SCALE for weight in row.weights[:num_kept])  # likeliest first
        children.append(Children(token_ids=tuple(row_drawn[:num_kept]), probs=probs, row=row))
    return children
