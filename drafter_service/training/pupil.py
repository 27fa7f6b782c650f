"""The drafter in training: one signature for draft models and heads, so that one loop trains and one table judges.

Root s of a window is a draft that begins when the target's states of tokens 0..s are known and token s+1 is the last
committed one. That is where every served drafter starts, so a pupil's rows here are its rows there:

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

POSITION_DECAY = 0.8  # weight of a draft position's loss beside that of the one before
SAVED_DTYPE = torch.float16  # of heads
MAX_SPAN = 64  # roots of a window that learn in one step, where each has masks of its own
FIRST_DRAFTED_ROW = 1  # of root 0: the target draws the first drafted token, 2, from its row after token 1


class Pupil(Protocol):
    """Anything that is distilled from a target."""

    @property
    def module(self) -> nn.Module:
        """Everything that is trained, and perhaps frozen parts beside it."""

    @property
    def teacher(self) -> Teacher:
        """The target, with the taps that the pupil needs."""

    @property
    def num_positions(self) -> int:
        """Draft positions that it proposes from one root, at least in training."""

    @property
    def vocab_ids(self) -> Tensor | None:
        """The target's ids of its reduced vocabulary, int64 [draft_vocab_size]; None: the target's own vocabulary."""

    def loss(self, lesson: Lesson) -> Tensor:
        """Return the mean loss over all roots and positions."""

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Return the logits of each draft position, given the text before: [rows, num_roots, draft_vocab_size]."""

    def save(self, folder: Path) -> None:
        """Write its public format."""


def num_roots(lesson: Lesson, num_positions: int) -> int:
    """Return how many roots of a window have a target row for each of so many draft positions."""
    return lesson.token_ids.shape[1] - num_positions


@dataclass(frozen=True, slots=True)
class TargetLaw:
    """The target's law after each token of a lesson, over a drafter's vocabulary, in the form that losses need."""

    probs: Tensor  # float32 [rows, window, draft_vocab_size]
    entropy: Tensor  # float32 [rows, window]
    counted: Tensor  # bool [rows, window]; False: not asked for, or the likeliest token is not in the vocabulary

    @classmethod
    def of(cls, lesson: Lesson, vocab_ids: Tensor | None, *, start: int = 0) -> TargetLaw:
        """Renormalise the target's rows from `start` on over a reduced vocabulary."""
        probs = lesson.logits(vocab_ids, start=start).softmax(-1)
        counted = lesson.counted[:, start:]
        if vocab_ids is not None:
            counted = counted & torch.isin(lesson.likeliest[:, start:], vocab_ids)
        return cls(probs, torch.special.entr(probs).sum(-1), counted)

    def divergence(self, draft_logits: Tensor, start: int, roots: Tensor | None = None) -> Tensor:
        """Return KL(target || draft), its mean over rows: soft cross-entropy to the target's law, less its entropy.

        draft_logits [rows, num_rows, draft_vocab_size] are held against the target's rows from `start` on, or `start`
        after `roots`, int64 [num_rows]. Rows whose likeliest token cannot be drafted teach nothing (Li et al., 2025),
        and neither do those of a prompt.
        """
        rows = slice(start, start + draft_logits.shape[1]) if roots is None else roots + start
        draft_logprobs = draft_logits.float().log_softmax(-1)
        divergence = -(self.probs[:, rows] * draft_logprobs).sum(-1) - self.entropy[:, rows]
        counted = self.counted[:, rows]
        return (divergence * counted).sum() / counted.sum().clamp_min(1)


def decayed_loss(rows: Sequence[Tensor], law: TargetLaw, *, decay: float, deep: Tensor | None = None) -> Tensor:
    """Return the weighted mean of the positions' divergences, draft position k with weight decay**k.

    `deep`, int64 [num_deep], are the roots of all positions beyond the first, where not all are drafted from.
    """
    weights = [decay**position for position in range(len(rows))]
    losses = [
        weight * law.divergence(logits, FIRST_DRAFTED_ROW + position, deep if position else None)
        for position, (weight, logits) in enumerate(zip(weights, rows, strict=True))
    ]
    return torch.stack(losses).sum() / sum(weights)


def position_loss(pupil: Pupil, lesson: Lesson) -> Tensor:
    """Return the loss of a pupil that learns all of its draft positions by themselves."""
    law = TargetLaw.of(lesson, pupil.vocab_ids)
    return decayed_loss(pupil.position_logits(lesson), law, decay=POSITION_DECAY)


def span_loss(guess: Callable[[Lesson, range], list[Tensor]], lesson: Lesson, num_positions: int) -> Tensor:
    """Return the loss over a run of a lesson's roots, drawn anew each time.

    `guess` returns the logits of each draft position for such a run: [rows, num_roots, vocab_size].
    """
    count = num_roots(lesson, num_positions)
    length = min(count, MAX_SPAN)
    first = int(torch.randint(count - length + 1, ()))
    law = TargetLaw.of(lesson, None, start=first)
    return decayed_loss(guess(lesson, range(first, first + length)), law, decay=POSITION_DECAY)
