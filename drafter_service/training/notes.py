"""A cache of the target's states for repeated windows: the target runs over each window once.

Conversations have few windows, which training sees several times; half of a step's time is the target's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.drafter_service.training.corpus_windows import Windows
from outrider.drafter_service.training.teacher import TaughtLesson, Teacher, asked_for
from outrider.verifier_service.messages.draft import FINAL_TAP

LIMIT_BYTES = 4 << 30  # some 3,500 windows of 256 tokens, with three taps of a target of width 576
CUDA_SHARE = 0.5  # of a GPU's free memory when training begins: steps need the rest
NOTED_DTYPE = torch.bfloat16  # has float32's range: some values of a state are in the ten thousands
TOLERANCE = 0.02  # of the largest logit: above rounding, below the effect of a logit cap or scale


class Notes:
    """A teacher's lessons, from the cache if possible."""

    def __init__(self, teacher: Teacher, *, limit_bytes: int | None = None) -> None:
        """Cache up to `limit_bytes` on the teacher's device; None: what it can spare."""
        self._teacher = teacher
        self._writer = teacher.tapping((*teacher.taps, FINAL_TAP))
        self._is_plain: bool | None = None  # whether logits follow from the last states; None: unknown
        self._noted: dict[int, tuple[Tensor, Tensor]] = {}  # by start: [window, width], [window]
        self._num_left = _spare_bytes(teacher.device) if limit_bytes is None else limit_bytes

    def lesson(self, windows: Windows) -> TaughtLesson:
        """Return the teacher's lesson of some windows."""
        if windows.starts is None or not self._is_of_use(windows):
            return self._teacher.lesson(windows.token_ids, windows.counted)
        noted = self._rows(windows.starts.tolist(), windows.token_ids)
        states = torch.stack([states for states, _ in noted]).float()
        width = states.shape[-1] - self._teacher.hidden_size
        return TaughtLesson(
            token_ids=windows.token_ids.to(self._teacher.device),
            final=states[..., width:],
            table=self._teacher.head,
            likeliest=torch.stack([likeliest for _, likeliest in noted]),
            states=states[..., :width],
            counted=asked_for(windows.counted.to(self._teacher.device)),
        )

    def _rows(self, starts: Sequence[int], token_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return each window's states, the last layer's at the end, and its likeliest tokens.

        All windows that are not cached run in one forward, which keeps a GPU busy.
        """
        missing = [row for row, start in enumerate(starts) if start not in self._noted]
        rows = {row: self._noted[start] for row, start in enumerate(starts) if start in self._noted}
        if missing:
            lesson = self._writer.lesson(token_ids[missing])
            states = lesson.states.to(NOTED_DTYPE)  # rounded also at the first use
            # copies: a view would keep the whole forward's memory
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
        """Return whether the target's logits are exactly its output embedding of the last states."""
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
