"""What the target made of windows that come again, so that it reads each of them once.

A conversation's windows are few, and training sees them several times; half of a step's time is the target's. Its
notes are the states that a lesson is made of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafter_service.training.corpus_windows import Windows
from outrider.drafter_service.training.teacher import Lesson, Teacher, asked_for
from outrider.verifier_service.messages.draft import FINAL_TAP

LIMIT_BYTES = 4 << 30  # some 3,500 windows of 256 tokens, with three taps of a target that is 576 wide
CUDA_SHARE = 0.5  # of what a GPU has free when training begins: steps need the rest
NOTED_DTYPE = torch.bfloat16  # reaches as far as float32: single values of a state are in the ten thousands
TOLERANCE = 0.02  # of the largest logit: more than rounding, less than a cap or a scale


class Notes:
    """The lessons of a teacher, out of notes where there are any."""

    def __init__(self, teacher: Teacher, *, limit_bytes: int | None = None) -> None:
        """Note so many bytes on the teacher's device; None: as many as that has to spare."""
        self._teacher = teacher
        self._writer = teacher.tapping((*teacher.taps, FINAL_TAP))
        self._is_plain: bool | None = None  # whether the states are enough; None: not known yet
        self._noted: dict[int, tuple[Tensor, Tensor]] = {}  # by start: [window, width], [window]
        self._num_left = _spare_bytes(teacher.device) if limit_bytes is None else limit_bytes

    def lesson(self, windows: Windows) -> Lesson:
        """Return the teacher's lesson over some windows."""
        if windows.starts is None or not self._is_of_use(windows):
            return self._teacher.lesson(windows.token_ids, windows.counted)
        noted = self._rows(windows.starts.tolist(), windows.token_ids)
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

    def _rows(self, starts: Sequence[int], token_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return of each window its states, the last ones at the end, and the likeliest tokens.

        All that are not noted are read in one forward: one by one they would leave a GPU idle.
        """
        missing = [row for row, start in enumerate(starts) if start not in self._noted]
        rows = {row: self._noted[start] for row, start in enumerate(starts) if start in self._noted}
        if missing:
            lesson = self._writer.lesson(token_ids[missing])
            states = lesson.states.to(NOTED_DTYPE)  # rounded the first time, too
            # copies: a part would keep all of the forward's memory
            read = [(states[place].clone(), lesson.likeliest[place].clone()) for place in range(len(missing))]
            rows |= dict(zip(missing, read, strict=True))
        for row in missing:
            self._note(starts[row], rows[row])
        return [rows[row] for row in range(len(starts))]

    def _note(self, start: int, row: tuple[Tensor, Tensor]) -> None:
        if start not in self._noted and row[0].nbytes <= self._num_left:
            self._noted[start] = row
            self._num_left -= row[0].nbytes

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


def _spare_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return LIMIT_BYTES
    return int(torch.cuda.mem_get_info(device)[0] * CUDA_SHARE)
