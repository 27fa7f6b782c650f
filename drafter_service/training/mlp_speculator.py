"""Distil an MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124), all of its steps together.

Each step reads the text's previous token; served, it reads the drafted one. The published recipe learns from text, then
from the target's own text; here every step learns the target's law.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.drafter_service.training.head_start import copy_if_it_fits
from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.student import SAVED_DTYPE, num_roots, position_loss
from outrider.drafter_service.training.teacher import Lesson, SomeTarget, Teacher
from outrider.verifier_service.messages.draft import FINAL_TAP


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpShape:
    """The options of a new speculator."""

    inner_dim: int = 0  # width of the recurrence; 0: the target's


class MlpStudent(Generic[SomeTarget]):
    """A speculator with a step per draft position; all steps share the embeddings."""

    vocab_ids: Tensor | None = None

    def __init__(self, speculator: MlpSpeculator, teacher: SomeTarget) -> None:
        self.module = speculator
        self.teacher = teacher.tapping((FINAL_TAP,))
        self.num_positions = speculator.n_predict

    @classmethod
    def create(cls, teacher: Teacher, *, shape: MlpShape, num_steps: int, seed: int) -> MlpStudent[Teacher]:
        """Create a speculator with random weights; steps share the embeddings, its largest part."""
        torch.manual_seed(seed)
        speculator = MlpSpeculator(
            emb_dim=teacher.hidden_size,
            vocab_size=teacher.vocab_size,
            n_predict=num_steps,
            inner_dim=shape.inner_dim,
            tie_weights=num_steps > 1,
            scale_input=True,
        ).to(teacher.device)
        with torch.no_grad():
            speculator.get_parameter("emb.0.weight").normal_(std=(2 / speculator.inner_dim) ** 0.5)
            copy_if_it_fits(speculator.get_parameter("head.0.weight"), teacher.head)
        return MlpStudent(speculator, teacher)

    def loss(self, lesson: Lesson, objective: Objective = Objective.CE) -> Tensor:
        return position_loss(self, lesson, objective)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Run the recurrence from every root: [rows, num_roots, vocab_size] per step."""
        count = num_roots(lesson, self.num_positions)
        state = self.module.start(lesson.states[:, :count])  # [rows, num_roots, emb_dim]
        logits: list[Tensor] = []
        for step in range(self.num_positions):
            rows, state = self.module.step(step, state, lesson.token_ids[:, 1 + step : 1 + step + count])
            logits.append(rows)
        return logits

    def save(self, folder: Path) -> None:
        self.module.save(folder, dtype=SAVED_DTYPE)
