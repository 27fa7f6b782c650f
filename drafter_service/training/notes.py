"""What the target made of windows that come again, so that it reads each of them once.

A conversation's windows are few, and training sees them several times; half of a step's time is the target's. Its
notes are the states that a lesson is made of.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafter_service.training.corpus_windows import Windows
from outrider.drafter_service.training.teacher import Lesson, Teacher, asked_for
from outrider.verifier_service.messages.draft import FINAL_TAP

LIMIT_BYTES = 4 << 30  # some 3,500 windows of 256 tokens, with three taps of a target that is 576 wide
NOTED_DTYPE = torch.bfloat16  # reaches as far as float32: single values of a state are in the ten thousands
TOLERANCE = 0.02  # of the largest logit: more than rounding, less than a cap or a scale


class Notes:
    """The lessons of a teacher, out of notes where there are any."""

    def __init__(self, teacher: Teacher, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._teacher = teacher
        self._writer = teacher.tapping((*teacher.taps, FINAL_TAP))
        self._is_plain: bool | None = None  # whether the states are enough; None: not known yet
        self._noted: dict[int, tuple[Tensor, Tensor]] = {}  # by start: [window, width], [window]
        self._num_left = limit_bytes

    def lesson(self, windows: Windows) -> Lesson:
        """Return the teacher's lesson over some windows."""
        if windows.starts is None or not self._is_of_use(windows):
            return self._teacher.lesson(windows.token_ids, windows.counted)
        noted = [self._row(start, windows.token_ids[row]) for row, start in enumerate(windows.starts.tolist())]
        states = torch.stack([states for states, _ in noted]).float()
        width = states.shape[-1] - self._teacher.hidden_size
        return Lesson(
            token_ids=windows.token_ids.to(self._teacher.device),
            final=states[..., width:],
            table=self._teacher.head,
            likeliest=torch.stack([likeliest for _, likeliest in noted]),
            states=states[..., :width],
            counted=asked_for(windows.counted.to(self._teacher.device)),
        )

    def _row(self, start: int, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of a window, the last ones at the end, and the likeliest tokens."""
        if start in self._noted:
            return self._noted[start]
        lesson = self._writer.lesson(token_ids[None])
        row = lesson.states[0].to(NOTED_DTYPE), lesson.likeliest[0]  # rounded the first time, too
        if row[0].nbytes <= self._num_left:
            self._noted[start] = row
            self._num_left -= row[0].nbytes
        return row

    def _is_of_use(self, windows: Windows) -> bool:
        """Tell whether the target's logits are its last states through its output embedding and nothing more."""
        if self._is_plain is None:
            with torch.autocast(self._teacher.device.type, enabled=False):
                lesson = self._writer.lesson(windows.token_ids[:1])
                final = lesson.states[..., -self._teacher.hidden_size :]
                again = F.linear(final, self._teacher.head.float())
            logits = lesson.logits()
            self._is_plain = bool((again - logits).abs().max() <= TOLERANCE * logits.abs().max())
        return self._is_plain
