"""What the host knows of a step's verification, sent to the device, and how the device judges the step's logits by it.

All shapes follow from the drafts, and nothing is read back: a plan could be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload, upload_rows
from outrider.verifier_service.messages.request import VerificationMode
from outrider.verifier_service.messages.tree import VerifiedTokens, ancestors
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, noise_keys, noise_of_keys
from outrider.verifier_service.sampling.draft_rows import DraftRows
from outrider.verifier_service.sampling.entries import VerificationEntry, edits_by_row, row_counts, rows_of_members
from outrider.verifier_service.sampling.logits_processors import SentEdits
from outrider.verifier_service.sampling.sampled_rows import SampledRows
from outrider.verifier_service.sampling.sampler import LawShapes, first_largest
from outrider.verifier_service.sampling.typical_acceptance import TypicalRows
from outrider.verifier_service.sampling.unread import UnreadTokens

Entries = Sequence[VerificationEntry]


@dataclass(frozen=True, slots=True)
class Judged:
    """What the device found for the entries of one mode."""

    ends: torch.Tensor  # int64 [num_entries] the row in which each path ends
    last: torch.Tensor  # int64 [num_entries] the last tokens
    laws_are_right: torch.Tensor | None = None  # bool [num_rows] of `LawShapes.probs`


Judge = Callable[[torch.Tensor], Judged]  # of float32 logits [num_rows, vocab_size]: pure, and it waits for nothing


@dataclass(frozen=True, slots=True)
class _Group:
    """The entries of one mode."""

    members: Sequence[int]  # their indices among the step's entries
    sent_rows: torch.Tensor | None  # int64 their rows in the step's logits; None: all
    unsure_rows: Sequence[int]  # all of their rows, if their laws may turn out wrong; else none
    judge: Judge


class VerificationPlan:
    """One step's verification."""

    def __init__(
        self,
        entries: Entries,
        uniforms: np.ndarray,
        vocab_size: int,
        device: torch.device,
        *,
        ranks_all: bool = False,
        unread: UnreadTokens | None = None,
    ) -> None:
        """uniforms float64 [num_rows]; `ranks_all` as in `LawShapes`; `unread`: what placeholders stand for."""
        self._entries = entries
        edits = edits_by_row(entries)
        self._edits = SentEdits.of(edits, vocab_size, device) if edits else None
        self._groups: list[_Group] = []
        modes = [entry.sampling.mode for entry in entries]
        for mode in VerificationMode:
            members = [index for index, own_mode in enumerate(modes) if own_mode is mode]
            if not members:
                continue
            own, rows = [entries[index] for index in members], rows_of_members(entries, members)
            sent_rows = upload_rows(rows, device) if len(members) < len(entries) else None
            if mode is VerificationMode.GREEDY:
                self._groups.append(_Group(members, sent_rows, (), _greedy(own, device, unread)))
                continue
            shapes = LawShapes.of(
                [entry.sampling for entry in own], vocab_size, device, counts=row_counts(own), ranks_all=ranks_all
            )
            if mode is VerificationMode.COUPLED:
                judge = _coupled(own, shapes, vocab_size, device, unread)
            else:
                judge = _sampled(SampledRows.of(own, uniforms[rows], vocab_size, device, unread), shapes)
            self._groups.append(_Group(members, sent_rows, () if shapes.are_sure else rows, judge))

    @property
    def places(self) -> list[int]:
        """Return where each entry's last token is in what `judge` returns."""
        order = [index for group in self._groups for index in group.members]
        found = {index: place for place, index in enumerate(order, start=len(order))}
        return [found[index] for index in range(len(order))]

    def judge(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the ends of all paths, group by group, all last tokens, and which unsure rows are right: int64."""
        logits = logits if self._edits is None else self._edits.applied(logits)
        judged = [
            group.judge(logits if group.sent_rows is None else logits.index_select(0, group.sent_rows))
            for group in self._groups
        ]
        are_right = [found.laws_are_right.long() for found in judged if found.laws_are_right is not None]
        return torch.cat([*(found.ends for found in judged), *(found.last for found in judged), *are_right])

    def read(self, numbers: Sequence[int]) -> tuple[list[VerifiedTokens], list[int]]:
        """Return each entry's tokens by what `judge` returned, and the rows whose laws were wrong."""
        num_entries = len(self._entries)
        found = iter(zip(numbers[:num_entries], numbers[num_entries : 2 * num_entries], strict=True))
        committed: dict[int, VerifiedTokens] = {}
        for group in self._groups:
            start = 0  # of an entry among the group's rows
            for index in group.members:
                entry, (end, token_id) = self._entries[index], next(found)
                committed[index] = VerifiedTokens.along(entry.draft, path_to(entry, end - start), token_id)
                start += entry.num_rows
        unsure_rows = [row for group in self._groups for row in group.unsure_rows]
        wrong = [row for row, is_right in zip(unsure_rows, numbers[2 * num_entries :], strict=True) if not is_right]
        return [committed[index] for index in range(num_entries)], wrong


def path_to(entry: VerificationEntry, row: int) -> tuple[int, ...]:
    """Return the draft tokens that lead to a row of the entry."""
    if entry.draft is None or entry.draft.parents is None:
        return tuple(range(row))
    return () if row == 0 else (*ancestors(entry.draft.parents, row - 1), row - 1)


def _greedy(entries: Entries, device: torch.device, unread: UnreadTokens | None) -> Judge:
    drafts = DraftRows.of([entry.draft for entry in entries], device, unread=unread)

    def judge(logits: torch.Tensor) -> Judged:
        choices = first_largest(logits)
        ends = drafts.ends(drafts.are_chosen(choices))
        return Judged(ends, choices[ends])

    return judge


def _coupled(
    entries: Entries, shapes: LawShapes, vocab_size: int, device: torch.device, unread: UnreadTokens | None
) -> Judge:
    drafts = DraftRows.of([entry.draft for entry in entries], device, unread=unread)
    typical = TypicalRows.of(entries, device)
    own = np.array([(entry.sampling.seed, entry.sampling.choice_index) for entry in entries], np.int64)
    positions = [position for entry in entries for position in entry.positions]
    (identities,) = upload([np.vstack([np.repeat(own.T, row_counts(entries), axis=1), positions])], device)

    def judge(logits: torch.Tensor) -> Judged:
        probs, laws_are_right = shapes.probs(logits)
        choices = coupled_choice(probs, noise_of_keys(noise_keys(*identities.unbind(0)), vocab_size))
        is_right = drafts.are_chosen(choices)
        if typical is not None:
            typical.judge(probs, drafts, is_right)
        ends = drafts.ends(is_right)
        return Judged(ends, choices[ends], laws_are_right)

    return judge


def _sampled(rows: SampledRows, shapes: LawShapes) -> Judge:
    def judge(logits: torch.Tensor) -> Judged:
        probs, laws_are_right = shapes.probs(logits)
        return Judged(*rows.judge(probs), laws_are_right)

    return judge
