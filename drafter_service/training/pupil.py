"""The drafter in training: one protocol for draft models and heads, so that one loop trains and evaluates all.

Root s of a window is a draft that begins with the target's states of tokens 0..s, and token s+1 as the last committed
one. Every served drafter starts like this, so that the pupil's rows are the same:

    tokens   0 .. s │ s+1 │ s+2  s+3 ..
    states   given  │  -  │  the draft: position k proposes token s+2+k
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.drafter_service.training.teacher import Lesson, Teacher

POSITION_DECAY = 0.8  # weight of a draft position's loss, relative to the position before
SAVED_DTYPE = torch.float16  # of heads
MAX_SPAN = 64  # roots of a window that learn in one step, if each has its own masks
FIRST_DRAFTED_ROW = 1  # of root 0: the first drafted token, 2, is predicted by the target's row after token 1


class Pupil(Protocol):
    """A drafter in training."""

    @property
    def module(self) -> nn.Module:
        """All trained parts, and perhaps frozen ones."""

    @property
    def teacher(self) -> Teacher:
        """The target, with the pupil's taps."""

    @property
    def num_positions(self) -> int:
        """Draft positions per root in training."""

    @property
    def vocab_ids(self) -> Tensor | None:
        """The target's ids of its reduced vocabulary, int64 [draft_vocab_size]; None: the target's whole vocabulary."""

    def loss(self, lesson: Lesson) -> Tensor:
        """Return the mean loss over all roots and positions."""

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Return the logits of each draft position, given the text before: [rows, num_roots, draft_vocab_size]."""

    def save(self, folder: Path) -> None:
        """Write its public format."""


def num_roots(lesson: Lesson, num_positions: int) -> int:
    """Return how many roots of a window have target rows for all draft positions."""
    return lesson.token_ids.shape[1] - num_positions


@dataclass(frozen=True, slots=True)
class TargetLaw:
    """The target's law after each token of a lesson, over a drafter's vocabulary, for losses."""

    probs: Tensor  # float32 [rows, window, draft_vocab_size]
    entropy: Tensor  # float32 [rows, window]
    counted: Tensor  # bool [rows, window]; False: never drafted, or the likeliest token is not in the vocabulary

    @classmethod
    def of(cls, lesson: Lesson, vocab_ids: Tensor | None, *, start: int = 0) -> TargetLaw:
        """Renormalise the target's rows from `start` on over a reduced vocabulary."""
        probs = lesson.logits(vocab_ids, start=start).softmax(-1)
        counted = lesson.counted[:, start:]
        if vocab_ids is not None:
            counted = counted & torch.isin(lesson.likeliest[:, start:], vocab_ids)
        return cls(probs, torch.special.entr(probs).sum(-1), counted)

    def divergence(self, draft_logits: Tensor, start: int, roots: Tensor | None = None) -> Tensor:
        """Return the mean of KL(target || draft) over rows: cross-entropy to the target's law minus its entropy.

        draft_logits [rows, num_rows, draft_vocab_size] are compared with the target's rows from `start` on, or `start`
        after `roots`, int64 [num_rows]. Left out are rows whose likeliest token cannot be drafted (Li et al., 2025),
        and rows of a prompt.
        """
        rows = slice(start, start + draft_logits.shape[1]) if roots is None else roots + start
        draft_logprobs = draft_logits.float().log_softmax(-1)
        divergence = -(self.probs[:, rows] * draft_logprobs).sum(-1) - self.entropy[:, rows]
        counted = self.counted[:, rows]
        return (divergence * counted).sum() / counted.sum().clamp_min(1)


def decayed_loss(rows: Sequence[Tensor], law: TargetLaw, *, decay: float, deep: Tensor | None = None) -> Tensor:
    """Return the weighted mean of the positions' divergences, draft position k with weight decay**k.

    `deep`, int64 [num_deep]: roots of the positions after the first, if these do not have all roots.
    """
    weights = [decay**position for position in range(len(rows))]
    losses = [
        weight * law.divergence(logits, FIRST_DRAFTED_ROW + position, deep if position else None)
        for position, (weight, logits) in enumerate(zip(weights, rows, strict=True))
    ]
    return torch.stack(losses).sum() / sum(weights)


def position_loss(pupil: Pupil, lesson: Lesson) -> Tensor:
    """Return the loss of a pupil with independent draft positions."""
    law = TargetLaw.of(lesson, pupil.vocab_ids)
    return decayed_loss(pupil.position_logits(lesson), law, decay=POSITION_DECAY)


def span_loss(guess: Callable[[Lesson, range], list[Tensor]], lesson: Lesson, num_positions: int) -> Tensor:
    """Return the loss over consecutive roots of a lesson, drawn at random.

    `guess` returns the logits of each draft position for these roots: [rows, num_roots, vocab_size].
    """
    count = num_roots(lesson, num_positions)
    length = min(count, MAX_SPAN)
    first = int(torch.randint(count - length + 1, ()))
    law = TargetLaw.of(lesson, None, start=first)
    return decayed_loss(guess(lesson, range(first, first + length)), law, decay=POSITION_DECAY)
