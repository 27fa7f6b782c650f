"""Draw draft tokens so that the verifier can judge them exactly.

A token drawn at random comes with the sparse integer row that it was drawn from: the row *is* the draft's law, so
truncating and quantising it costs acceptance, never exactness. Greedy and coupled tokens are point masses: ids alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.verifier_service.coupled_sampler import coupled_choice, noise_keys, noise_of_keys
from outrider.verifier_service.drafting import DRAFT_PROB_SCALE, DraftSampling, SparseRow
from outrider.verifier_service.request import GREEDY_TEMPERATURE
from outrider.verifier_service.sampler import target_probs, top_candidates


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

    logits float32 [num_rows, draft_vocab_size]; ids from `vocab_size` (the shared vocabulary) on are never proposed.
    `positions` are the absolute positions of the tokens to be chosen: with a seed the choice is made under the same
    noise as the target's own. `rng` gives one number per unseeded sampled row, in row order.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    assert logits.shape[0] == len(samplings) == len(positions), (logits.shape, len(samplings), len(positions))
    assert 1 <= top_n <= DRAFT_PROB_SCALE, top_n
    logits = logits[:, :vocab_size]
    greedy = [row for row, sampling in enumerate(samplings) if sampling.temperature <= GREEDY_TEMPERATURE]
    seeded = [row for row in _others(samplings, greedy) if samplings[row].seed is not None]
    unseeded = _others(samplings, [*greedy, *seeded])
    drafted: dict[int, tuple[int, SparseRow | None]] = {}
    if greedy:
        drafted |= _point_masses(greedy, _select(logits, greedy).argmax(dim=1))
    if seeded:
        choices = _coupled(_select(logits, seeded), [samplings[r] for r in seeded], [positions[r] for r in seeded])
        drafted |= _point_masses(seeded, choices)
    if unseeded:
        probs = target_probs(_select(logits, unseeded), [samplings[row] for row in unseeded])
        drafted |= dict(zip(unseeded, _draw(*quantised_rows(probs, top_n), rng), strict=True))
    return [drafted[row] for row in range(len(samplings))]


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


def _point_masses(rows: Sequence[int], token_ids: torch.Tensor) -> dict[int, tuple[int, SparseRow | None]]:
    return {row: (token_id, None) for row, token_id in zip(rows, token_ids.tolist(), strict=True)}


def _coupled(logits: torch.Tensor, samplings: Sequence[DraftSampling], positions: Sequence[int]) -> torch.Tensor:
    rows = [(sampling.seed, sampling.choice_index, at) for sampling, at in zip(samplings, positions, strict=True)]
    seeds, choice_indices, at = torch.tensor(rows, dtype=torch.int64, device=logits.device).unbind(1)
    noise = noise_of_keys(noise_keys(seeds, choice_indices, at), logits.shape[1])
    return coupled_choice(target_probs(logits, samplings), noise)


def _draw(ids: torch.Tensor, weights: torch.Tensor, rng: torch.Generator) -> list[tuple[int, SparseRow]]:
    """Draw one token per row by its integer weights: ids, weights int64 [num_rows, num_candidates]."""
    tickets = torch.randint(DRAFT_PROB_SCALE, (len(ids), 1), generator=rng, device=rng.device).to(ids.device)
    ranks = torch.searchsorted(weights.cumsum(dim=1), tickets, right=True)  # a weight of 0 is passed over
    drawn = ids.gather(1, ranks)[:, 0].tolist()
    return [
        (token_id, _sparse_row(row_ids, row_weights))
        for token_id, row_ids, row_weights in zip(drawn, ids.tolist(), weights.tolist(), strict=True)
    ]


def _sparse_row(ids: Sequence[int], weights: Sequence[int]) -> SparseRow:
    kept = [(id_, weight) for id_, weight in zip(ids, weights, strict=True) if weight]
    return SparseRow(token_ids=tuple(id_ for id_, _ in kept), weights=tuple(weight for _, weight in kept))
