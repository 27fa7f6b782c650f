"""What one request brings to a step's verification."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.sampling.logits_processors import LogitEdits


@dataclass(slots=True)  # made for each request and step: frozen, that takes 2.4 times as long
class VerificationEntry:
    """One request's share of a step: `num_rows` consecutive rows of logits.

    Row 0 follows the last committed token, row i + 1 follows draft token i, in a chain and in a tree.
    """

    sampling: SamplingParams
    draft: Draft | None
    position: int  # absolute position of the first token to be chosen: what row 0 chooses
    edits: LogitEdits | None = None  # to be made before anything is chosen

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return () if self.draft is None else self.draft.token_ids

    @property
    def num_rows(self) -> int:
        return len(self.draft_token_ids) + 1

    @property
    def positions(self) -> list[int]:
        """Return the absolute position that each row chooses a token for: in a tree it follows from the row's depth."""
        if self.draft is None or self.draft.parents is None:
            return list(range(self.position, self.position + self.num_rows))
        return [self.position, *(self.position + depth + 1 for depth in depths(self.draft.parents))]

    @property
    def rule(self) -> AcceptanceRule:
        """The rule that judges the draft. A tree is never judged by blocks: see block_verification.py."""
        is_tree = self.draft is not None and self.draft.parents is not None
        if self.sampling.acceptance is AcceptanceRule.BLOCK and is_tree:
            return AcceptanceRule.STANDARD
        return self.sampling.acceptance


def row_counts(entries: Sequence[VerificationEntry]) -> list[int]:
    """Return each entry's number of rows."""
    return [1 if entry.draft is None else 1 + len(entry.draft.token_ids) for entry in entries]


def first_rows(entries: Sequence[VerificationEntry]) -> list[int]:
    """Return each entry's first row."""
    return list(itertools.accumulate(row_counts(entries), initial=0))[:-1]


def rows_of_members(entries: Sequence[VerificationEntry], members: Sequence[int]) -> list[int]:
    """Return the rows of some of the entries, one entry after the other."""
    counts = row_counts(entries)
    if len(members) == len(entries):
        return list(range(sum(counts)))
    starts = list(itertools.accumulate(counts, initial=0))
    return [row for index in members for row in range(starts[index], starts[index] + counts[index])]


def edits_by_row(entries: Sequence[VerificationEntry]) -> list[tuple[int, LogitEdits]]:
    """Return the edits of the entries that have any, with their first rows."""
    if not [entry for entry in entries if entry.edits is not None]:
        return []
    starts = first_rows(entries)
    found = [(row, entry.edits) for row, entry in zip(starts, entries, strict=True) if entry.edits is not None]
    assert all(entry.edits is None or len(entry.edits.biases) == entry.num_rows for entry in entries)
    return found
