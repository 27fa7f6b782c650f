"""The drafter in training: one protocol for draft models and heads, so that one loop trains and evaluates all.

Root s of a window is a draft that begins with the target's states of tokens 0..s, and token s+1 as the last committed
one. Every served drafter starts like this, so that the student's rows are the same:

    tokens   0 .. s │ s+1 │ s+2  s+3 ..
    states   given  │  -  │  the draft: position k proposes token s+2+k
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from outrider.drafter_service.training.objectives import Objective, draft_loss
from outrider.drafter_service.training.teacher import Lesson, Teacher

SAVED_DTYPE = torch.float16  # of heads
MAX_SPAN = 64  # roots of a window that learn in one step, if each has its own masks


class Student(Protocol):
    """A drafter that learns from lessons, wherever they come from."""

    @property
    def module(self) -> nn.Module:
        """All trained parts, and perhaps frozen ones."""

    @property
    def num_positions(self) -> int:
        """Draft positions per root in training."""

    @property
    def vocab_ids(self) -> Tensor | None:
        """The target's ids of its reduced vocabulary, int64 [draft_vocab_size]; None: the target's whole vocabulary."""

    def loss(self, lesson: Lesson, objective: Objective = Objective.CE) -> Tensor:
        """Return the mean loss over all roots and positions."""

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Return the logits of each draft position, given the text before: [rows, num_roots, draft_vocab_size]."""

    def save(self, folder: Path) -> None:
        """Write its public format."""


class TaughtStudent(Student, Protocol):
    """A drafter with a live target that teaches it."""

    @property
    def teacher(self) -> Teacher:
        """The target, with the student's taps."""


def num_roots(lesson: Lesson, num_positions: int) -> int:
    """Return how many roots of a window have target rows for all draft positions."""
    return lesson.token_ids.shape[1] - num_positions


def position_loss(student: Student, lesson: Lesson, objective: Objective) -> Tensor:
    """Return the loss of a drafter with independent draft positions."""
    return draft_loss(student.position_logits(lesson), lesson.law(student.vocab_ids), objective)


def span_loss(
    guess: Callable[[Lesson, range], list[Tensor]], lesson: Lesson, num_positions: int, objective: Objective
) -> Tensor:
    """Return the loss over consecutive roots of a lesson, drawn at random.

    `guess` returns the logits of each draft position for these roots: [rows, num_roots, vocab_size].
    """
    count = num_roots(lesson, num_positions)
    length = min(count, MAX_SPAN)
    first = int(torch.randint(count - length + 1, ()))
    law = lesson.law(None, start=first)
    return draft_loss(guess(lesson, range(first, first + length)), law, objective)
