"""A step's verification on a device: what the host knows goes there, all is judged there, one small copy comes back.

    host    entries -> numbers of drafts, shapes of laws, noise keys, uniform numbers ─┐ copies that nobody waits for
    device  logits ─> edits ─> laws ─> accepted ─> ends of paths ─> last tokens ───────┴> two numbers per request
    host    `collect` waits for that copy alone

A request's tokens follow from the row in which its path ends and the last token. The one thing that cannot be known
before is a nucleus that outgrows the candidates that are looked at (`LawShapes`): the copy says so, and such a step is
judged again with those rows sorted whole. verification.py does the same on the host, and is the reference.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import CopyBack, upload, upload_rows
from outrider.verifier_service.messages.request import AcceptanceRule, VerificationMode
from outrider.verifier_service.messages.tree import VerifiedTokens, ancestors, parents_of
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, noise_keys, noise_of_keys
from outrider.verifier_service.sampling.draft_rows import DraftRows
from outrider.verifier_service.sampling.entries import VerificationEntry, edits_by_row, first_rows, rows_of_members
from outrider.verifier_service.sampling.logits_processors import SentEdits
from outrider.verifier_service.sampling.rejection_sampler import choose_from_rest
from outrider.verifier_service.sampling.sampler import LawShapes
from outrider.verifier_service.sampling.siblings import Blocks, Families, judge_siblings, last_uniforms
from outrider.verifier_service.sampling.typical_acceptance import are_typical

Entries = Sequence[VerificationEntry]


@dataclass(frozen=True, slots=True)
class Judged:
    """What the device found for the entries of one mode."""

    ends: torch.Tensor  # int64 [num_entries] the row in which each path ends
    last: torch.Tensor  # int64 [num_entries] the last tokens
    is_right: torch.Tensor | None = None  # bool [num_rows] of `LawShapes.probs`

    @property
    def packed(self) -> torch.Tensor:
        """All in one: int64 [2 * num_entries + num_rows where any may be wrong]."""
        parts = [self.ends, self.last]
        return torch.cat(parts if self.is_right is None else [*parts, self.is_right.long()])


Judge = Callable[[torch.Tensor], Judged]  # of float32 logits [num_rows, vocab_size]: pure, and it waits for nothing


@dataclass(frozen=True, slots=True)
class _Group:
    """The entries of one mode."""

    mode: VerificationMode
    members: Sequence[int]  # their indices among the step's entries
    rows: torch.Tensor | None  # int64 of the step's logits; None: all
    judge: Judge


class DevicePlan:
    """All that the host knows of a step's verification, on its way to the device."""

    def __init__(
        self,
        entries: Entries,
        uniforms: torch.Tensor,
        vocab_size: int,
        device: torch.device,
        whole_rows: Mapping[VerificationMode, Sequence[int]],
    ) -> None:
        """uniforms float64, one per row of the rejection-sampled entries, in host memory.

        `whole_rows` are those of a mode's rows whose laws need the whole vocabulary sorted.
        """
        edits = edits_by_row(entries)
        self._edits = SentEdits.of(edits, vocab_size, device) if edits else None
        self.groups: list[_Group] = []
        self.sizes: list[int] = []  # of what each group says
        for mode in VerificationMode:
            members = [index for index, entry in enumerate(entries) if entry.sampling.mode is mode]
            if not members:
                continue
            own = [entries[index] for index in members]
            rows = None
            if len(members) < len(entries):
                rows = upload_rows(rows_of_members(entries, members), device)
            if mode is VerificationMode.GREEDY:
                judge = _greedy(own, device)
            else:
                samplings = [entry.sampling for entry in own for _ in range(entry.num_rows)]
                shapes = LawShapes.of(samplings, vocab_size, device, whole_rows.get(mode, ()))
                if mode is VerificationMode.COUPLED:
                    judge = _coupled(own, shapes, vocab_size, device)
                else:
                    judge = _sampled(SampledRows.of(own, uniforms, vocab_size, device), shapes)
            self.groups.append(_Group(mode, members, rows, judge))

    @property
    def places(self) -> list[int]:
        """Return where in what was judged each entry's last token stands."""
        starts = itertools.accumulate(self.sizes, initial=0)
        found = {
            index: start + len(group.members) + offset
            for group, start in zip(self.groups, starts, strict=False)
            for offset, index in enumerate(group.members)
        }
        return [found[index] for index in range(len(found))]

    def judge(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what `Judged.packed` has of each group, one after the other: int64."""
        logits = logits if self._edits is None else self._edits.applied(logits)
        rows = (logits if group.rows is None else logits.index_select(0, group.rows) for group in self.groups)
        said = [group.judge(own).packed for group, own in zip(self.groups, rows, strict=True)]
        self.sizes = [len(packed) for packed in said]
        return torch.cat(said)


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The last tokens of a step's entries, on the device before anybody has read them."""

    numbers: torch.Tensor  # int64, tokens among others
    places: Sequence[int]  # of each entry's token


class PendingVerification:
    """A step that the device is judging."""

    def __init__(self, logits: torch.Tensor, entries: Entries, uniforms: torch.Tensor) -> None:
        """`logits` must stay as they are until `collect` has returned."""
        self._logits, self._entries, self._uniforms = logits, entries, uniforms
        self.corrected: frozenset[int] = frozenset()
        self._plan, numbers = self._launched({})
        self.chosen = ChosenTokens(numbers, self._plan.places)
        self._back = CopyBack(numbers)

    def collect(self) -> list[VerifiedTokens]:
        """Wait for the device, and return each entry's committed tokens."""
        committed, whole_rows = self._read(self._back.wait().tolist())
        if whole_rows:
            owners = self._owners(whole_rows)
            self._plan, numbers = self._launched(whole_rows)
            again, _ = self._read(CopyBack(numbers).wait().tolist())
            self.corrected = frozenset(index for index in owners if again[index] != committed[index])
            committed |= {index: again[index] for index in self.corrected}
        return [committed[index] for index in range(len(self._entries))]

    def _launched(self, whole_rows: Mapping[VerificationMode, Sequence[int]]) -> tuple[DevicePlan, torch.Tensor]:
        device, vocab_size = self._logits.device, self._logits.shape[1]
        plan = DevicePlan(self._entries, self._uniforms, vocab_size, device, whole_rows)
        return plan, plan.judge(self._logits)

    def _owners(self, whole_rows: Mapping[VerificationMode, Sequence[int]]) -> frozenset[int]:
        """Return the entries that these rows are of."""
        owners: set[int] = set()
        for group in self._plan.groups:
            own = [index for index in group.members for _ in range(self._entries[index].num_rows)]
            owners |= {own[row] for row in whole_rows.get(group.mode, ())}
        return frozenset(owners)

    def _read(self, numbers: Sequence[int]) -> tuple[dict[int, VerifiedTokens], dict[VerificationMode, list[int]]]:
        """Return each entry's tokens, and by mode the rows whose laws were not right."""
        committed: dict[int, VerifiedTokens] = {}
        wrong: dict[VerificationMode, list[int]] = {}
        place = 0
        for group, size in zip(self._plan.groups, self._plan.sizes, strict=True):
            own = [self._entries[index] for index in group.members]
            ends, last, are_right = np.split(np.array(numbers[place : place + size]), [len(own), 2 * len(own)])
            place += size
            for index, entry, start, end, token_id in zip(
                group.members, own, first_rows(own), ends.tolist(), last.tolist(), strict=True
            ):
                committed[index] = VerifiedTokens.along(entry.draft, path_to(entry, end - start), token_id)
            if not are_right.all():
                wrong[group.mode] = np.flatnonzero(are_right == 0).tolist()
        return committed, wrong


def launch(logits: torch.Tensor, entries: Entries, rng: torch.Generator) -> PendingVerification:
    """Begin to verify a step: as `verify`, but what it returns is asked for its tokens later.

    There is at least one entry; `rng` is of the host.
    """
    num_sampled = sum(entry.num_rows for entry in entries if entry.sampling.mode is VerificationMode.REJECTION)
    uniforms = torch.rand(num_sampled, dtype=torch.float64, generator=rng) if num_sampled else torch.zeros(0)
    return PendingVerification(logits, entries, uniforms)


def path_to(entry: VerificationEntry, row: int) -> tuple[int, ...]:
    """Return the draft tokens that lead to a row of the entry."""
    return () if row == 0 else (*ancestors(parents_of(entry.draft), row - 1), row - 1)


def _greedy(entries: Entries, device: torch.device) -> Judge:
    drafts = DraftRows.of([entry.draft for entry in entries], device)

    def judge(logits: torch.Tensor) -> Judged:
        choices = logits.argmax(dim=1)
        ends = drafts.ends(drafts.token_ids == choices[drafts.parents])
        return Judged(ends, choices[ends])

    return judge


def _coupled(entries: Entries, shapes: LawShapes, vocab_size: int, device: torch.device) -> Judge:
    drafts = DraftRows.of([entry.draft for entry in entries], device)
    typical = _TypicalRows.of(entries, device)
    numbers = [
        (entry.sampling.seed, entry.sampling.choice_index, position)
        for entry in entries
        for position in entry.positions
    ]
    (identities,) = upload([np.array(numbers, np.int64).T], device)

    def judge(logits: torch.Tensor) -> Judged:
        probs, laws_are_right = shapes.probs(logits)
        choices = coupled_choice(probs, noise_of_keys(noise_keys(*identities.unbind(0)), vocab_size))
        is_right = drafts.token_ids == choices[drafts.parents]
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


@dataclass(frozen=True, slots=True)
class _TypicalRows:
    """The draft tokens that need only be likely enough."""

    rows: torch.Tensor  # int64 [num_tokens] that follow them
    limits: torch.Tensor  # float64 [num_tokens, 2] epsilon and delta

    @classmethod
    def of(cls, entries: Entries, device: torch.device) -> _TypicalRows | None:
        """Return None where nobody has such tokens."""
        rows: list[int] = []
        limits: list[tuple[float, float]] = []
        for entry, start in zip(entries, first_rows(entries), strict=True):
            if entry.rule is AcceptanceRule.TYPICAL:
                rows += range(start + 1, start + entry.num_rows)
                limits += [(entry.sampling.typical_epsilon, entry.sampling.typical_delta)] * (entry.num_rows - 1)
        return cls(*upload([np.array(rows, np.int64), np.array(limits)], device)) if rows else None

    def judge(self, probs: torch.Tensor, drafts: DraftRows, is_right: torch.Tensor) -> None:
        """Write over what was said of these rows."""
        found = are_typical(probs, drafts.parents[self.rows], drafts.token_ids[self.rows], self.limits)
        is_right.index_copy_(0, self.rows, found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRows:
    """The drafts of unseeded requests, each to be judged by its rule."""

    drafts: DraftRows
    families: Families
    blocks: Blocks | None
    typical: _TypicalRows | None
    uniforms: torch.Tensor  # float64 [num_rows]
    last_uniforms: torch.Tensor  # int64 [num_rows] the row whose uniform number draws the last token after each row

    @classmethod
    def of(cls, entries: Entries, uniforms: torch.Tensor, vocab_size: int, device: torch.device) -> SampledRows:
        """uniforms float64 [num_rows] in host memory; a request uses its own as the references do."""
        assert uniforms.shape == (sum(entry.num_rows for entry in entries),), uniforms.shape
        assert uniforms.dtype == torch.float64, uniforms.dtype
        drafts = [entry.draft for entry in entries]
        by_blocks = [entry.rule is AcceptanceRule.BLOCK for entry in entries]
        judged = [None if entry.rule is AcceptanceRule.TYPICAL else entry.draft for entry in entries]
        starts = first_rows(entries)
        families = Families.of(judged, starts, len(uniforms), vocab_size, device)
        last = [row for entry, start in zip(entries, starts, strict=True) for row in _last_uniforms(entry, start)]
        sent, last_rows = upload([uniforms.numpy(), np.array(last, np.int64)], device)
        return cls(
            drafts=DraftRows.of(drafts, device, alone=by_blocks),
            families=families,
            blocks=Blocks.of(drafts, starts, by_blocks, families),
            typical=_TypicalRows.of(entries, device),
            uniforms=sent,
            last_uniforms=last_rows,
        )

    def judge(self, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where paths end and the last tokens, both int64 [num_entries], by laws [num_rows, vocab_size]."""
        families, uniforms = self.families, self.uniforms
        found = families.found(probs)
        is_right, taken = judge_siblings(families, found, uniforms)
        if self.blocks is not None:
            self.blocks.judge(families, found, uniforms, is_right, taken)
        if self.typical is not None:
            self.typical.judge(probs, self.drafts, is_right)
        ends = self.drafts.ends(is_right)
        owners = families.of_rows[ends]
        target_rows = probs.index_select(0, ends).double()
        places = families.token_ids[owners].clamp(max=families.vocab_size - 1)  # nothing is taken outside
        residual = target_rows.scatter_add(1, places, -taken[owners])
        return ends, choose_from_rest(target_rows, residual, uniforms[self.last_uniforms[ends]])


def _last_uniforms(entry: VerificationEntry, start: int) -> list[int]:
    if entry.rule is AcceptanceRule.BLOCK:
        return [start + entry.num_rows - 1] * entry.num_rows
    if entry.rule is AcceptanceRule.TYPICAL:
        return [start] * entry.num_rows
    return last_uniforms(entry.draft, start)
