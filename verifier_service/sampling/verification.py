"""Turn one step's logits into committed tokens for all its requests: greedy, by rejection, or coupled.

| acceptance | greedy, coupled                           | rejection                                                  |
| standard   | down the tree while a child is the        | token by token, in a tree sibling by sibling               |
| block      | target's own choice                       | chains by blocks; a draft with `parents` as standard       |
| typical    | greedy: the same; coupled: likely tokens, | likely tokens, then one drawn from the target              |
|            | then the target's own choice              |                                                            |

There is one path, on an accelerator and on a CPU, with one short cut (`walk_greedily`). The logits' device judges every
token, and one small copy comes back:

    host    drafts, shapes of laws, noise keys, uniform numbers ─┐ uploads that nobody waits for
    device  logits ─> edits ─> laws ─> accepted tokens ─> ends of paths ─> last tokens ─┐
    host    `collect` waits for two numbers per request: where its path ends, and its last token

Only one thing is unknown when a step is launched: whether a nucleus outgrows the candidates that are ranked
(`LawShapes`). The copy says which rows were too flat, and `collect` judges their requests again with the whole
vocabulary ranked. The slow references of all rules are in tests/exactness/references.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import CopyBack, upload_rows
from outrider.verifier_service.messages.request import VerificationMode
from outrider.verifier_service.messages.tree import VerifiedTokens, parents_of
from outrider.verifier_service.sampling.entries import VerificationEntry, row_counts, rows_of_members
from outrider.verifier_service.sampling.sampler import first_largest
from outrider.verifier_service.sampling.unread import UnreadTokens
from outrider.verifier_service.sampling.verification_plan import VerificationPlan


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The last tokens of a step's entries, on the device before anybody has read them."""

    numbers: torch.Tensor  # int64, tokens among other numbers
    places: Sequence[int]  # where each entry's token is


class Verification(Protocol):
    """A step's verification that was begun."""

    @property
    def chosen(self) -> ChosenTokens | None:
        """The last tokens that the step commits, before they are read; None: the step has no entries."""

    @property
    def corrected(self) -> frozenset[int]:
        """The entries for which `chosen` was wrong; known when `collect` has returned."""

    def collect(self) -> list[VerifiedTokens]:
        """Return each entry's committed tokens: accepted draft tokens, then one recovered or bonus token."""


def begin(
    logits: torch.Tensor,
    entries: Sequence[VerificationEntry],
    rng: torch.Generator,
    rows: Sequence[int] | None = None,
    unread: UnreadTokens | None = None,
) -> Verification:
    """Begin to verify a step without waiting for its logits, which must not change before `collect` has returned.

    logits float32 [num_rows, vocab_size], of which `rows` (None: all) belong to the entries, one entry's after the
    other's. An entry's edits are made to a copy. `rng`, a generator of the host, gives one uniform number per row of a
    rejection-sampled request, accepted or not, in row order; the other modes take none. `unread`: what the drafts'
    placeholders stand for; before `collect`, the drafts themselves must have been put into the entries.
    """
    assert (logits.dtype, logits.ndim) == (torch.float32, 2), (logits.dtype, logits.shape)
    num_rows = logits.shape[0] if rows is None else len(rows)
    assert num_rows == sum(row_counts(entries)), (num_rows, len(entries))
    if not entries:
        return DoneVerification([], None)
    if rows is not None:
        logits = logits.index_select(0, upload_rows(rows, logits.device))
    if logits.device.type == "cpu" and unread is None and all(_is_plainly_greedy(entry) for entry in entries):
        return walk_greedily(logits, entries)
    return PendingVerification(logits, entries, draw_uniforms(entries, rng), unread)


def draw_uniforms(entries: Sequence[VerificationEntry], rng: torch.Generator) -> np.ndarray:
    """Draw the uniform numbers of the rejection-sampled entries' rows: float64 [num_rows], 0 in all other rows."""
    are_sampled = [entry.sampling.mode is VerificationMode.REJECTION for entry in entries]
    is_sampled = np.repeat(are_sampled, row_counts(entries))
    uniforms = np.zeros(len(is_sampled))
    if num_sampled := int(is_sampled.sum()):
        uniforms[is_sampled] = torch.rand(num_sampled, dtype=torch.float64, generator=rng).numpy()
    return uniforms


@dataclass(frozen=True, slots=True)
class DoneVerification:
    """A verification that had ended when it was begun."""

    committed: list[VerifiedTokens]
    chosen: ChosenTokens | None
    corrected: frozenset[int] = frozenset()

    def collect(self) -> list[VerifiedTokens]:
        return self.committed


def _is_plainly_greedy(entry: VerificationEntry) -> bool:
    return entry.sampling.mode is VerificationMode.GREEDY and entry.edits is None


def walk_greedily(logits: torch.Tensor, entries: Sequence[VerificationEntry]) -> DoneVerification:
    """Verify greedy entries without edits on a CPU: walk down while a draft token is the target's own choice.

    A short cut: the plan commits the same tokens, but one request's step of a small model takes 1 to 2 % longer by it.
    """
    choices = first_largest(logits)
    tokens = choices.tolist()
    committed, places, start = [], [], 0
    for entry in entries:
        path: list[int] = []
        end = start  # the row in which the path ends
        for index, (token_id, parent) in enumerate(zip(entry.draft_token_ids, parents_of(entry.draft), strict=True)):
            if start + parent + 1 == end and token_id == tokens[end]:
                path.append(index)
                end = start + index + 1
        committed.append(VerifiedTokens.along(entry.draft, path, tokens[end]))
        places.append(end)
        start += entry.num_rows
    return DoneVerification(committed, ChosenTokens(choices, places))


class PendingVerification:
    """A step that the logits' device is judging."""

    def __init__(
        self,
        logits: torch.Tensor,
        entries: Sequence[VerificationEntry],
        uniforms: np.ndarray,
        unread: UnreadTokens | None = None,
    ) -> None:
        """Launch it: at least one entry, uniforms float64 [num_rows] of `draw_uniforms`; `unread` as in `begin`."""
        self._logits, self._entries, self._uniforms = logits, entries, uniforms
        self.corrected: frozenset[int] = frozenset()
        self._plan = VerificationPlan(entries, uniforms, logits.shape[1], logits.device, unread=unread)
        numbers = self._plan.judge(logits)
        self.chosen = ChosenTokens(numbers, self._plan.places)
        self._back = CopyBack(numbers)

    def collect(self) -> list[VerifiedTokens]:
        """Wait for the device, and return each entry's committed tokens."""
        committed, flat_rows = self._plan.read(self._back.wait().tolist())
        if flat_rows:
            again = self._judge_again(flat_rows)
            self.corrected = frozenset(index for index, tokens in again.items() if tokens != committed[index])
            committed = [again.get(index, tokens) for index, tokens in enumerate(committed)]
        return committed

    def _judge_again(self, flat_rows: Sequence[int]) -> dict[int, VerifiedTokens]:
        """Judge the entries that these rows are of, with the whole vocabulary ranked."""
        owners = [index for index, entry in enumerate(self._entries) for _ in range(entry.num_rows)]
        members = sorted({owners[row] for row in flat_rows})
        rows = rows_of_members(self._entries, members)
        entries, device = [self._entries[index] for index in members], self._logits.device
        plan = VerificationPlan(entries, self._uniforms[rows], self._logits.shape[1], device, ranks_all=True)
        numbers = plan.judge(self._logits.index_select(0, upload_rows(rows, device)))
        committed, _ = plan.read(CopyBack(numbers).wait().tolist())
        return dict(zip(members, committed, strict=True))
