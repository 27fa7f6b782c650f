"""Draw draft tokens so that the verifier can judge them exactly.

A token drawn at random comes with the sparse integer row that it was drawn from: the row *is* the draft's law, so
truncating and quantising it costs acceptance, never exactness. Greedy and coupled tokens are point masses: ids alone.
Siblings of a tree are drawn from their row one after another without replacement (SpecInfer, Miao et al. 2024), or are
its likeliest tokens as point masses (EAGLE-2, Li et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, DraftSampling, SparseRow
from outrider.verifier_service.messages.request import GREEDY_TEMPERATURE
from outrider.verifier_service.sampling.coupled_sampler import (
    NOISE_FRACTION_BITS,
    coupled_choice,
    noise_keys,
    noise_of_keys,
)
from outrider.verifier_service.sampling.sampler import target_probs, top_candidates

MAX_LOGIT = 1e30  # finite after any temperature, too
_TICKET_BITS = 62  # a ticket modulo at most 2^16 is uniform to 2^-46, and exactly so for a sibling drawn first


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """Siblings in the order in which they are to be tried."""

    token_ids: tuple[int, ...]
    # the drafter's estimate that each is accepted where its parent is; of drawn ones a function of the row alone
    probs: tuple[float, ...]
    row: SparseRow | None = None  # what they were drawn from; None: point masses


def draft_children(
    logits: torch.Tensor,
    samplings: Sequence[DraftSampling],
    positions: Sequence[int],
    rng: torch.Generator,
    *,
    vocab_size: int,
    num_children: int,
    top_n: int = 32,
    sampled: bool = False,
) -> list[Children]:
    """Choose up to `num_children` tokens per row, fewer only where the row knows no more.

    logits float32 [num_rows, draft_vocab_size]; ids from `vocab_size` (the shared vocabulary) on are never proposed.
    `positions` are the absolute positions of the tokens to be chosen: with a seed the choice is made under the same
    noise as the target's own, whose likeliest choice comes first. Without seed and temperature 0 the law's likeliest
    tokens are taken, or, `sampled`, as many are drawn from its `top_n` likeliest without replacement: then `rng` gives
    `num_children` numbers per row, and how many there are depends on the row alone.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    assert logits.shape[0] == len(samplings) == len(positions), (logits.shape, len(samplings), len(positions))
    assert 1 <= top_n <= DRAFT_PROB_SCALE, top_n
    assert num_children >= 1, num_children
    # a model that overflows makes a bad guess, and nothing worse; -inf alone means what it says: never
    logits = logits[:, :vocab_size].nan_to_num(nan=0.0, neginf=-math.inf).clamp(max=MAX_LOGIT)
    greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature <= GREEDY_TEMPERATURE]
    seeded = [row for row in _others(samplings, greedy) if samplings[row].seed is not None]
    unseeded = _others(samplings, [*greedy, *seeded])
    chosen: dict[int, Children] = {}
    if greedy:
        chosen |= zip(greedy, _likeliest(_select(logits, greedy), num_children), strict=True)
    if seeded:
        at = [positions[row] for row in seeded]
        coupled = _coupled(_select(logits, seeded), [samplings[row] for row in seeded], at, num_children)
        chosen |= zip(seeded, coupled, strict=True)
    if unseeded:
        probs = target_probs(_select(logits, unseeded), [samplings[row] for row in unseeded])
        drawn = _draw(*quantised_rows(probs, top_n), rng, num_children) if sampled else _best(probs, num_children)
        chosen |= zip(unseeded, drawn, strict=True)
    return [chosen[row] for row in range(len(samplings))]


def draft_tokens(
    logits: torch.Tensor,
    samplings: Sequence[DraftSampling],
    positions: Sequence[int],
    rng: torch.Generator,
    *,
    vocab_size: int,
    top_n: int = 32,
) -> list[tuple[int, SparseRow | None]]:
    """Choose one token per row, with the distribution it was drawn from where it was drawn at random.

    The arguments are those of `draft_children`.
    """
    chosen = draft_children(
        logits, samplings, positions, rng, vocab_size=vocab_size, num_children=1, top_n=top_n, sampled=True
    )
    return [(children.token_ids[0], children.row) for children in chosen]


def quantised_rows(probs: torch.Tensor, top_n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep the `top_n` likeliest tokens and round to integer weights that sum to DRAFT_PROB_SCALE.

    probs float32 [num_rows, vocab_size] -> token ids and weights, both int64 [num_rows, <= top_n], likeliest first;
    what rounds to 0 is left in with weight 0. Largest remainders are rounded up.
    """
    values, ids = top_candidates(probs, min(top_n, probs.shape[1]))
    shares = values.double()
    shares *= DRAFT_PROB_SCALE / shares.sum(dim=1, keepdim=True)
    weights = shares.floor()
    by_remainder = (shares - weights).argsort(dim=1, descending=True, stable=True)
    missing = DRAFT_PROB_SCALE - weights.sum(dim=1, keepdim=True)  # fewer than there are columns
    rounded_up = (torch.arange(ids.shape[1], device=ids.device) < missing).to(weights.dtype).expand_as(weights)
    return ids, weights.scatter_add_(1, by_remainder, rounded_up).to(torch.int64)


def _others(samplings: Sequence[DraftSampling], rows: Sequence[int]) -> list[int]:
    taken = set(rows)
    return [row for row in range(len(samplings)) if row not in taken]


def _select(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits if len(rows) == logits.shape[0] else logits[torch.tensor(rows, device=logits.device)]


def _likeliest(logits: torch.Tensor, num_children: int) -> list[Children]:
    """Take the largest logits of each row, with their probabilities at temperature 1."""
    values, ids = _top(logits, num_children)
    return _point_masses(ids, (values - logits.logsumexp(dim=1, keepdim=True)).exp())


def _best(probs: torch.Tensor, num_children: int) -> list[Children]:
    values, ids = _top(probs, num_children)
    return _point_masses(ids, values)


def _coupled(
    logits: torch.Tensor, samplings: Sequence[DraftSampling], positions: Sequence[int], num_children: int
) -> list[Children]:
    """Take the largest log2 probs + noise of each row, the first as the target takes its own.

    What speaks for a child is its lead over the others under this noise, not its probability without it: the estimate
    is its share of the sum of 2^(log2 probs + noise).
    """
    rows = [(sampling.seed, sampling.choice_index, at) for sampling, at in zip(samplings, positions, strict=True)]
    seeds, choice_indices, at = torch.tensor(rows, dtype=torch.int64, device=logits.device).unbind(1)
    noise = noise_of_keys(noise_keys(seeds, choice_indices, at), logits.shape[1])
    probs = target_probs(logits, samplings)
    first = coupled_choice(probs, noise)[:, None]  # [num_rows, 1]
    scores = noise.double().div_(1 << NOISE_FRACTION_BITS).add_(probs.double().log2_())  # [num_rows, vocab_size]
    shares = scores.sub_(scores.amax(dim=1, keepdim=True)).exp2_()
    shares /= shares.sum(dim=1, keepdim=True)
    if num_children == 1:
        return _point_masses(first, shares.gather(1, first))
    values, ids = _top(shares.float().scatter_(1, first, 2.0), num_children)
    values[:, :1] = shares.gather(1, first)
    return _point_masses(ids, values)


def _top(values: torch.Tensor, num_wanted: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest values of each row and their ids, [num_rows, <= num_wanted] each; equal ones by id."""
    if num_wanted == 1:  # needs no order
        best = values.max(dim=1, keepdim=True)
        return best.values, best.indices
    return top_candidates(values, min(num_wanted, values.shape[1]))


def _point_masses(ids: torch.Tensor, probs: torch.Tensor) -> list[Children]:
    """Make children of ids and probs, both [num_rows, num_children]; impossible ones but a first are left out."""
    children: list[Children] = []
    for row_ids, row_probs in zip(ids.tolist(), probs.tolist(), strict=True):
        num_kept = max(1, sum(prob > 0.0 for prob in row_probs))
        children.append(Children(token_ids=tuple(row_ids[:num_kept]), probs=tuple(row_probs[:num_kept])))
    return children


def _draw(ids: torch.Tensor, weights: torch.Tensor, rng: torch.Generator, num_children: int) -> list[Children]:
    """Draw tokens by their integer weights without replacement: ids, weights int64 [num_rows, num_candidates]."""
    tickets = torch.randint(1 << _TICKET_BITS, (len(ids), num_children), generator=rng, device=rng.device)
    left = weights.clone()
    drawn: list[torch.Tensor] = []
    for ticket in tickets.to(ids.device).split(1, dim=1):
        cumulative = left.cumsum(dim=1)
        ranks = torch.searchsorted(cumulative, ticket % cumulative[:, -1:].clamp(min=1), right=True)
        ranks.clamp_(max=ids.shape[1] - 1)  # nothing is left to draw from: cut off below
        drawn.append(ids.gather(1, ranks))
        left.scatter_(1, ranks, 0)
    return [
        _drawn_children(row_drawn, _sparse_row(row_ids, row_weights))
        for row_drawn, row_ids, row_weights in zip(
            torch.cat(drawn, dim=1).tolist(), ids.tolist(), weights.tolist(), strict=True
        )
    ]


def _drawn_children(drawn: Sequence[int], row: SparseRow) -> Children:
    """Keep as many as the row has tokens; the estimates are its largest probabilities, whatever was drawn."""
    num_kept = min(len(drawn), len(row.token_ids))
    probs = tuple(weight / DRAFT_PROB_SCALE for weight in row.weights[:num_kept])  # likeliest first
    return Children(token_ids=tuple(drawn[:num_kept]), probs=probs, row=row)


def _sparse_row(ids: Sequence[int], weights: Sequence[int]) -> SparseRow:
    kept = [(id_, weight) for id_, weight in zip(ids, weights, strict=True) if weight]
    return SparseRow(token_ids=tuple(id_ for id_, _ in kept), weights=tuple(weight for _, weight in kept))
