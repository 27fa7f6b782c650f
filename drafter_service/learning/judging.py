"""A candidate on held-out samples: how long its greedy chain agrees with what the target committed, and its loss."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.drafter_service.learning.reservoir import Kept
from outrider.drafter_service.learning.served_lessons import Reading, ServedLesson, draw_lesson
from outrider.drafter_service.training.objectives import FIRST_DRAFTED_ROW, draft_loss
from outrider.drafter_service.training.student import Student

NUM_LESSONS = 8  # of held-out windows
SEED = 20_260_101  # windows are the same for both that are compared
# shares of the serving figures: what is broken is far beyond them, and what is a little better or worse the trial tells
CHAIN_TOLERANCE, LOSS_TOLERANCE = 0.1, 0.05


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A drafter's figures on held-out windows."""

    num_roots: int
    chain_length: float  # draft tokens that are the target's before the first that is not, greedy, mean over roots
    loss: float

    def is_worse_than(self, serving: HeldOut) -> bool:
        """Return whether the chain is much shorter, or the loss higher; a figure that is no number is worse."""
        is_as_long = self.chain_length >= serving.chain_length * (1 - CHAIN_TOLERANCE)
        return not (is_as_long and self.loss <= serving.loss * (1 + LOSS_TOLERANCE))


@torch.no_grad()
def judge(
    student: Student, reading: Reading, kept: Sequence[Kept], *, rows: int, window: int, device: torch.device
) -> HeldOut:
    """Measure a drafter in full precision on windows of held-out samples, which a fixed seed draws."""
    student.module.eval()
    rng = random.Random(SEED)
    num_roots, length, losses = 0, 0.0, []
    for _ in range(NUM_LESSONS if kept else 0):
        lesson = draw_lesson(
            *(kept, [1.0] * len(kept), reading),
            rows=rows,
            window=window,
            num_positions=student.num_positions,
            rng=rng,
            device=device,
        )
        if lesson is not None:
            logits = student.position_logits(lesson)
            found, agreed = agreement(logits, student.vocab_ids, lesson)
            num_roots, length = num_roots + found, length + agreed
            losses.append(draft_loss(logits, lesson.law(student.vocab_ids)).item())
    student.module.train()
    return HeldOut(num_roots, length / max(1, num_roots), sum(losses) / max(1, len(losses)))


def agreement(rows: Sequence[Tensor], vocab_ids: Tensor | None, lesson: ServedLesson) -> tuple[int, float]:
    """Return the number of roots whose positions all count, and the sum of their agreeing chains.

    `rows` are the logits of each draft position: [rows, num_roots, draft_vocab_size].
    """
    count = rows[0].shape[1] - 1  # the last root's last token is behind the window
    counts = torch.ones_like(lesson.counted[:, :count]) if lesson.has_state is None else lesson.has_state[:, :count]
    running = torch.ones_like(counts, dtype=torch.float32)
    length = torch.zeros_like(running)
    for position, logits in enumerate(rows):
        row = FIRST_DRAFTED_ROW + position
        likeliest = logits[:, :count].argmax(-1)  # [rows, num_roots]
        if vocab_ids is not None:
            likeliest = vocab_ids[likeliest]
        running = running * (likeliest == lesson.token_ids[:, row + 1 : row + 1 + count])
        length = length + running
        counts = counts & lesson.counted[:, row : row + count]
    return int(counts.sum()), float((length * counts).sum())
