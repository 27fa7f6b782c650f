"""One student's training on served samples: warm from what serves, one bounded step at a time."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.drafter_service.heads.head_files import weight_files
from outrider.drafter_service.learning.judging import HeldOut, judge
from outrider.drafter_service.learning.reservoir import Kept, reward_weights
from outrider.drafter_service.learning.served_lessons import Reading, draw_lesson
from outrider.drafter_service.learning.students import StudentMaker
from outrider.drafter_service.training.distil import FINE_TUNING, VECTOR_LR_WIDTH
from outrider.drafter_service.training.precision import half_precision
from outrider.drafter_service.training.recipe import Recipe
from outrider.drafter_service.training.student import Student
from outrider.drafter_service.training.trainer import MAX_GRAD_NORM, StudentOptimizers
from outrider.verifier_service.folders import copy_plain
from outrider.verifier_service.formats.checkpoint import WeightError

ROWS, WINDOW = 8, 256  # of a step: seconds on a core for a small drafter
MATRIX_LR = 0.04  # of Muon, for a new head: `DistilOptions.matrix_lr`


class OnlineTraining(Protocol):
    """What a learner asks of its student."""

    @property
    def rows(self) -> int:
        """Windows of one step."""

    def begin(self, folder: Path | None) -> None:
        """Train anew from a folder's weights; None: those that the pool started with."""

    def step(self, kept: Sequence[Kept], *, rate_scale: float, is_weighted: bool) -> float | None:
        """Train one step; return its loss, or None if no sample teaches anything.

        Raises `ArithmeticError` if loss or weights are no numbers: what is trained is lost.
        """

    def save(self, folder: Path) -> None:
        """Write the weights. Raises `ArithmeticError` if they are no numbers."""

    def judge(self, folder: Path, serving: Path | None, kept: Sequence[Kept]) -> tuple[HeldOut, HeldOut]:
        """Measure a folder's weights and those that serve on held-out samples."""

    def take(self, folder: Path, to: Path) -> None:
        """Copy a folder's weights, and no other file of it, into a new one.

        Raises `ValueError` unless the pool's drafters can take the copies.
        """

    def first_folder(self) -> Path:
        """Return the folder that the pool started from."""


@dataclass(slots=True)
class _Run:
    """Training since its beginning."""

    student: Student
    reading: Reading
    recipe: Recipe
    optimizers: StudentOptimizers
    num_steps: int = 0

    @classmethod
    def of(cls, student: Student, reading: Reading) -> _Run:
        """Begin with the rates of a fine-tuned drafter: a wide one's embeddings learn more slowly."""
        scale = FINE_TUNING * min(1.0, VECTOR_LR_WIDTH / _width(student, reading))
        recipe = Recipe(minutes=math.inf, matrix_lr=MATRIX_LR * FINE_TUNING)
        recipe = replace(recipe, vector_lr=recipe.vector_lr * scale)
        return cls(student, reading, recipe, StudentOptimizers(student.module, recipe))


class StudentTraining:
    """Training of real weights."""

    def __init__(
        self, maker: StudentMaker, *, device: torch.device, seed: int = 0, rows: int = ROWS, window: int = WINDOW
    ) -> None:
        self._maker, self._device = maker, device
        self.rows, self._window = rows, window
        self._rng = random.Random(seed)
        torch.manual_seed(seed)
        self._run: _Run | None = None

    def begin(self, folder: Path | None) -> None:
        self._run = None  # frees its memory first
        self._run = _Run.of(*self._maker.load(folder or self.first_folder()))

    def step(self, kept: Sequence[Kept], *, rate_scale: float, is_weighted: bool) -> float | None:
        run = self._begun()
        lesson = draw_lesson(
            *(kept, reward_weights(kept) if is_weighted else [1.0] * len(kept), run.reading),
            rows=self.rows,
            window=self._window,
            num_positions=run.student.num_positions,
            rng=self._rng,
            device=self._device,
        )
        if lesson is None:
            return None
        with half_precision(self._device):
            loss = run.student.loss(lesson)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(run.student.module.parameters(), MAX_GRAD_NORM)
        value, size = loss.item(), float(norm)
        if not (math.isfinite(value) and math.isfinite(size)):
            raise ArithmeticError(f"after {run.num_steps} steps the loss is {value:g}, its gradient {size:g}")
        run.optimizers.step(rate_scale * min(1.0, (run.num_steps + 1) / run.recipe.warm_up_steps))
        run.num_steps += 1
        return value

    def save(self, folder: Path) -> None:
        run = self._begun()
        if not all(bool(parameter.isfinite().all()) for parameter in run.student.module.parameters()):
            raise ArithmeticError(f"after {run.num_steps} steps a weight is no number")
        run.student.save(folder)

    def judge(self, folder: Path, serving: Path | None, kept: Sequence[Kept]) -> tuple[HeldOut, HeldOut]:
        return self._measure(folder, kept), self._measure(serving or self.first_folder(), kept)

    def take(self, folder: Path, to: Path) -> None:
        if not folder.is_dir():
            raise WeightError(f"there is no folder {folder}")
        to.mkdir()
        copy_plain(weight_files(folder), folder, to)
        first = self.first_folder()
        self._maker.require_alike(self._maker.load(first)[0], to)
        for path in first.iterdir():  # its tokenizer, where it has one
            if path.is_file() and not (to / path.name).exists() and path.name not in weight_files(first):
                shutil.copyfile(path, to / path.name)

    def first_folder(self) -> Path:
        return self._maker.first_folder()

    def _measure(self, folder: Path, kept: Sequence[Kept]) -> HeldOut:
        student, reading = self._maker.load(folder)
        return judge(student, reading, kept, rows=self.rows, window=self._window, device=self._device)

    def _begun(self) -> _Run:
        assert self._run is not None, "the training has not begun"
        return self._run


def _width(student: Student, reading: Reading) -> int:
    """Return the width of the drafter's embeddings; of a head, that of the target's states is near enough."""
    config: Any = getattr(student.module, "config", None)
    return int(getattr(config, "hidden_size", None) or reading.state_width)
