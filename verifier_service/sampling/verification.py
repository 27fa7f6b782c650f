"""Turn one step's logits into committed tokens for all its requests: greedy, by rejection, or coupled.

| acceptance | greedy, coupled                           | rejection                                                  |
| standard   | down the tree while a child is the        | token by token, in a tree sibling by sibling               |
| block      | target's own choice                       | chains by blocks; a draft with `parents` as standard       |
| typical    | greedy: the same; coupled: likely tokens, | likely tokens, then one drawn from the target              |
|            | then the target's own choice              |                                                            |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.request import AcceptanceRule, VerificationMode
from outrider.verifier_service.messages.tree import VerifiedTokens, is_chain, matching_path, parents_of
from outrider.verifier_service.sampling.block_verification import verify_blocks
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, noise_keys, noise_of_keys
from outrider.verifier_service.sampling.device_verification import ChosenTokens, launch
from outrider.verifier_service.sampling.entries import VerificationEntry, edits_by_row, first_rows, rows_of_members
from outrider.verifier_service.sampling.logits_processors import apply_edits
from outrider.verifier_service.sampling.rejection_sampler import draw_from_rest, verify_batch_by_rejection
from outrider.verifier_service.sampling.sampler import target_probs
from outrider.verifier_service.sampling.tree_sampler import verify_trees
from outrider.verifier_service.sampling.typical_acceptance import typical_paths


class Verification(Protocol):
    """A step's verification that was begun."""

    @property
    def chosen(self) -> ChosenTokens | None:
        """The last tokens that it commits, before they are read; None: nowhere but here."""

    @property
    def corrected(self) -> frozenset[int]:
        """The entries for which `chosen` turned out to be wrong, once all is collected."""

    def collect(self) -> list[VerifiedTokens]:
        """Return each entry's committed tokens: accepted draft tokens, then one recovered or bonus token."""


def begin(
    logits: torch.Tensor,
    entries: Sequence[VerificationEntry],
    rng: torch.Generator,
    rows: Sequence[int] | None = None,
) -> Verification:
    """Begin to verify a step without waiting for its logits, which must stay as they are until all is collected.

    logits float32 [num_rows, vocab_size], of which `rows` (None: all) are those of the entries, one after another; an
    entry's edits are made to a copy. `rng` gives one uniform number per row of a rejection-sampled request, accepted or
    not, in row order; the other modes take none. On a device all is judged there, on the host when it is collected.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    num_rows = logits.shape[0] if rows is None else len(rows)
    assert num_rows == sum(entry.num_rows for entry in entries), (num_rows, len(entries))
    if logits.device.type == "cpu" or not entries:
        return _OnHost(logits, entries, rng, rows)
    if rows is not None:
        logits = logits.index_select(0, upload_rows(rows, logits.device))
    return launch(logits, entries, rng)


def verify(logits: torch.Tensor, entries: Sequence[VerificationEntry], rng: torch.Generator) -> list[VerifiedTokens]:
    """Verify a step from beginning to end; see `begin`."""
    return begin(logits, entries, rng).collect()


@dataclass(frozen=True, slots=True)
class _OnHost:
    logits: torch.Tensor
    entries: Sequence[VerificationEntry]
    rng: torch.Generator
    rows: Sequence[int] | None
    chosen: None = None
    corrected: frozenset[int] = frozenset()

    def collect(self) -> list[VerifiedTokens]:
        rows = None if self.rows is None else torch.tensor(self.rows, dtype=torch.int64)
        return verify_on_host(self.logits if rows is None else self.logits[rows], self.entries, self.rng)


def verify_on_host(
    logits: torch.Tensor, entries: Sequence[VerificationEntry], rng: torch.Generator
) -> list[VerifiedTokens]:
    """As `verify`, walking down drafts on the host: where nothing is far, that is less work."""
    logits = apply_edits(logits, edits_by_row(entries))
    indices = {mode: [i for i, entry in enumerate(entries) if entry.sampling.mode is mode] for mode in VerificationMode}
    committed: dict[int, VerifiedTokens] = {}
    for mode, members in indices.items():
        if members:
            chosen = [entries[index] for index in members]
            verified = _verify_mode(mode, _rows_of(logits, entries, members), chosen, rng)
            committed |= zip(members, verified, strict=True)
    return [committed[index] for index in range(len(entries))]


def _rows_of(values: torch.Tensor, entries: Sequence[VerificationEntry], members: Sequence[int]) -> torch.Tensor:
    """Select the members' rows, without a copy when they are all."""
    if len(members) == len(entries):
        return values
    return values.index_select(0, torch.tensor(rows_of_members(entries, members), device=values.device))


def _verify_mode(
    mode: VerificationMode, logits: torch.Tensor, entries: Sequence[VerificationEntry], rng: torch.Generator
) -> list[VerifiedTokens]:
    if mode is VerificationMode.GREEDY:
        return _accept_equal(logits.argmax(dim=1).tolist(), entries)
    probs = target_probs(logits, [entry.sampling for entry in entries for _ in range(entry.num_rows)])
    if mode is VerificationMode.COUPLED:
        noise = noise_of_keys(_keys(entries, logits.device), logits.shape[1])
        return _accept_coupled(probs, coupled_choice(probs, noise).tolist(), entries)
    uniforms = torch.rand(len(probs), dtype=torch.float64, generator=rng, device=rng.device)
    return _accept_sampled(probs, entries, uniforms)


def _keys(entries: Sequence[VerificationEntry], device: torch.device) -> torch.Tensor:
    """Return the noise key of every row: int64 [num_rows]."""
    rows = [
        (entry.sampling.seed, entry.sampling.choice_index, position)
        for entry in entries
        for position in entry.positions
    ]
    seeds, choice_indices, positions = torch.tensor(rows, dtype=torch.int64, device=device).unbind(1)
    return noise_keys(seeds, choice_indices, positions)


def _accept_equal(choices: Sequence[int], entries: Sequence[VerificationEntry]) -> list[VerifiedTokens]:
    """Walk down while a draft token is the target's own choice, and commit the choice that none equals.

    choices [num_rows], one after the root and one after each draft token.
    """
    committed = []
    for start, entry in zip(first_rows(entries), entries, strict=True):
        own = choices[start : start + entry.num_rows]
        committed.append(_chosen(entry, own, matching_path(entry.draft_token_ids, parents_of(entry.draft), own)))
    return committed


def _accept_coupled(
    probs: torch.Tensor, choices: Sequence[int], entries: Sequence[VerificationEntry]
) -> list[VerifiedTokens]:
    """Judge seeded requests: under typical acceptance the noise decides the last token alone."""
    committed = _accept_equal(choices, entries)
    members = [i for i, entry in enumerate(entries) if entry.sampling.acceptance is AcceptanceRule.TYPICAL]
    if members:
        starts = first_rows(entries)
        chosen = [entries[index] for index in members]
        for index, path in zip(members, _typical_paths(_rows_of(probs, entries, members), chosen), strict=True):
            own = choices[starts[index] : starts[index] + entries[index].num_rows]
            committed[index] = _chosen(entries[index], own, path)
    return committed


def _chosen(entry: VerificationEntry, own: Sequence[int], path: Sequence[int]) -> VerifiedTokens:
    return VerifiedTokens.along(entry.draft, path, own[_row_after(path)])


def _row_after(path: Sequence[int]) -> int:
    return path[-1] + 1 if path else 0


_Judge = Callable[[torch.Tensor, Sequence[VerificationEntry], torch.Tensor], list[VerifiedTokens]]


def _accept_sampled(
    probs: torch.Tensor, entries: Sequence[VerificationEntry], uniforms: torch.Tensor
) -> list[VerifiedTokens]:
    """Judge unseeded requests, each by its rule: probs [num_rows, vocab_size], uniforms [num_rows]."""
    groups: dict[_Judge, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        groups[_judge_of(entry)].append(index)
    committed: dict[int, VerifiedTokens] = {}
    for judge, members in groups.items():
        chosen = [entries[index] for index in members]
        verified = judge(_rows_of(probs, entries, members), chosen, _rows_of(uniforms, entries, members))
        committed |= zip(members, verified, strict=True)
    return [committed[index] for index in range(len(entries))]


def _judge_of(entry: VerificationEntry) -> _Judge:
    if entry.rule is AcceptanceRule.TYPICAL:
        return _by_typicality
    if entry.rule is AcceptanceRule.BLOCK:
        return _by_blocks
    return _by_rejection if is_chain(parents_of(entry.draft)) else _by_trees


def _by_rejection(
    probs: torch.Tensor, entries: Sequence[VerificationEntry], uniforms: torch.Tensor
) -> list[VerifiedTokens]:
    committed = verify_batch_by_rejection(probs, [entry.draft for entry in entries], uniforms)
    return [VerifiedTokens(token_ids, tuple(range(len(token_ids) - 1))) for token_ids in committed]


def _by_trees(
    probs: torch.Tensor, entries: Sequence[VerificationEntry], uniforms: torch.Tensor
) -> list[VerifiedTokens]:
    return verify_trees(probs, [entry.draft for entry in entries], uniforms)


def _by_blocks(
    probs: torch.Tensor, entries: Sequence[VerificationEntry], uniforms: torch.Tensor
) -> list[VerifiedTokens]:
    return verify_blocks(probs, [entry.draft for entry in entries], uniforms)


def _by_typicality(
    probs: torch.Tensor, entries: Sequence[VerificationEntry], uniforms: torch.Tensor
) -> list[VerifiedTokens]:
    paths = _typical_paths(probs, entries)
    starts = first_rows(entries)
    rows = [start + _row_after(path) for start, path in zip(starts, paths, strict=True)]
    last = draw_from_rest(probs, rows, [{}] * len(entries), uniforms[starts])
    return [
        VerifiedTokens.along(entry.draft, path, token_id)
        for entry, path, token_id in zip(entries, paths, last, strict=True)
    ]


def _typical_paths(probs: torch.Tensor, entries: Sequence[VerificationEntry]) -> list[tuple[int, ...]]:
    return typical_paths(probs, [entry.draft for entry in entries], [entry.sampling for entry in entries])
