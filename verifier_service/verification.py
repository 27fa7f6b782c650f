"""Turn one step's logits into committed tokens for all its requests: greedy, by rejection, or coupled."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.verifier_service.coupled_sampler import coupled_choice, noise_keys, noise_of_keys
from outrider.verifier_service.drafting import Draft
from outrider.verifier_service.logits_processors import LogitEdits, apply_edits
from outrider.verifier_service.rejection_sampler import verify_batch_by_rejection
from outrider.verifier_service.request import SamplingParams, VerificationMode
from outrider.verifier_service.sampler import target_probs


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationEntry:
    """One request's share of a step: `num_rows` consecutive rows of logits."""

    sampling: SamplingParams
    draft: Draft | None
    position: int  # absolute position of the first token to be chosen
    edits: LogitEdits | None = None  # to be made before anything is chosen

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.token_ids

    @property
    def num_rows(self) -> int:
        return len(self.draft_token_ids) + 1


def verify(logits: torch.Tensor, entries: Sequence[VerificationEntry], rng: torch.Generator) -> list[list[int]]:
    """Return each entry's committed tokens: accepted draft tokens, then one recovered or bonus token.

    logits float32 [num_rows, vocab_size], the rows of the entries one after another; they stay as they are, an entry's
    edits are made to a copy. `rng` gives one uniform number per row of a rejection-sampled request, accepted or not, in
    row order; the other modes take none.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    assert logits.shape[0] == sum(entry.num_rows for entry in entries), (logits.shape, len(entries))
    logits = apply_edits(logits, _edits_by_row(entries))
    indices = {mode: [i for i, entry in enumerate(entries) if entry.sampling.mode is mode] for mode in VerificationMode}
    committed: list[list[int]] = [[] for _ in entries]
    for mode, members in indices.items():
        if members:
            chosen = [entries[index] for index in members]
            tokens = _verify_mode(mode, _rows_of(logits, entries, members), chosen, rng)
            for index, token_ids in zip(members, tokens, strict=True):
                committed[index] = token_ids
    return committed


def _first_rows(entries: Sequence[VerificationEntry]) -> list[int]:
    return list(itertools.accumulate((entry.num_rows for entry in entries), initial=0))[:-1]


def _edits_by_row(entries: Sequence[VerificationEntry]) -> list[tuple[int, LogitEdits]]:
    assert all(entry.edits is None or len(entry.edits.biases) == entry.num_rows for entry in entries)
    starts = _first_rows(entries)
    return [(row, entry.edits) for row, entry in zip(starts, entries, strict=True) if entry.edits is not None]


def _rows_of(logits: torch.Tensor, entries: Sequence[VerificationEntry], members: Sequence[int]) -> torch.Tensor:
    """Select the members' rows, without a copy when they are all."""
    if len(members) == len(entries):
        return logits
    starts = _first_rows(entries)
    rows = [starts[index] + offset for index in members for offset in range(entries[index].num_rows)]
    return logits.index_select(0, torch.tensor(rows, device=logits.device))


def _verify_mode(
    mode: VerificationMode, logits: torch.Tensor, entries: Sequence[VerificationEntry], rng: torch.Generator
) -> list[list[int]]:
    if mode is VerificationMode.GREEDY:
        return _accept_equal(logits.argmax(dim=1).tolist(), entries)
    probs = target_probs(logits, [entry.sampling for entry in entries for _ in range(entry.num_rows)])
    if mode is VerificationMode.COUPLED:
        noise = noise_of_keys(_keys(entries, logits.device), logits.shape[1])
        return _accept_equal(coupled_choice(probs, noise).tolist(), entries)
    uniforms = torch.rand(len(probs), dtype=torch.float64, generator=rng, device=rng.device)
    return verify_batch_by_rejection(probs, [entry.draft for entry in entries], uniforms)


def _keys(entries: Sequence[VerificationEntry], device: torch.device) -> torch.Tensor:
    """Return the noise key of every row: int64 [num_rows]."""
    rows = [
        (entry.sampling.seed, entry.sampling.choice_index, entry.position + offset)
        for entry in entries
        for offset in range(entry.num_rows)
    ]
    seeds, choice_indices, positions = torch.tensor(rows, dtype=torch.int64, device=device).unbind(1)
    return noise_keys(seeds, choice_indices, positions)


def _accept_equal(choices: Sequence[int], entries: Sequence[VerificationEntry]) -> list[list[int]]:
    """Commit the target's own choices up to the first that differs from the draft: choices [num_rows]."""
    committed, start = [], 0
    for entry in entries:
        own = choices[start : start + entry.num_rows]
        num_accepted = 0
        for draft_token, token_id in zip(entry.draft_token_ids, own, strict=False):
            if draft_token != token_id:
                break
            num_accepted += 1
        committed.append(list(own[: num_accepted + 1]))
        start += entry.num_rows
    return committed
