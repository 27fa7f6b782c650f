"""Distil Medusa heads (Cai et al. 2024, arXiv 2401.10774): head k learns the target's law k + 2 tokens ahead.

The published recipe with a frozen target (Medusa-1), but with cross-entropy to the target's law instead of the text's
tokens: each row teaches the whole distribution that rejection sampling compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic

import torch
from torch import Tensor

from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.drafter_service.training.corpus_windows import TokenStream, frequent_ids
from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.student import SAVED_DTYPE, num_roots, position_loss
from outrider.drafter_service.training.teacher import Lesson, SomeTarget, Teacher
from outrider.verifier_service.messages.draft import FINAL_TAP


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaShape:
    """The options of new heads."""

    num_layers: int = 1
    draft_vocab_size: int = 0  # the most frequent tokens; 0: the target's whole vocabulary


class MedusaStudent(Generic[SomeTarget]):
    """Heads over the target's last state, each with its own output embedding."""

    def __init__(self, heads: MedusaHeads, teacher: SomeTarget) -> None:
        self.module = heads
        self.teacher = teacher.tapping((FINAL_TAP,))
        self.num_positions = heads.num_heads
        self.vocab_ids = heads.token_map

    @classmethod
    def create(
        cls, teacher: Teacher, stream: TokenStream, *, shape: MedusaShape, num_heads: int, seed: int
    ) -> MedusaStudent[Teacher]:
        """Create heads: output embeddings start as the target's, blocks pass the state through."""
        torch.manual_seed(seed)
        is_reduced = 0 < shape.draft_vocab_size < teacher.vocab_size
        token_map = frequent_ids(stream, teacher.vocab_size, shape.draft_vocab_size) if is_reduced else None
        heads = MedusaHeads(
            hidden_size=teacher.hidden_size,
            vocab_size=teacher.vocab_size,
            num_heads=num_heads,
            num_layers=shape.num_layers,
            token_map=token_map,
        ).to(teacher.device)
        with torch.no_grad():
            rows = teacher.head if token_map is None else teacher.head[token_map.to(teacher.device)]
            for name, parameter in heads.named_parameters():
                if name.startswith("lm_heads."):
                    parameter.copy_(rows)
                else:
                    parameter.zero_()
        return MedusaStudent(heads, teacher)

    def loss(self, lesson: Lesson, objective: Objective = Objective.CE) -> Tensor:
        return position_loss(self, lesson, objective)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Return each head's rows: [rows, num_roots, draft_vocab_size] per head."""
        count = num_roots(lesson, self.num_positions)
        logits = self.module(lesson.states[:, :count])  # [num_heads, rows, num_roots, vocab_size]
        return [head if self.vocab_ids is None else head[..., self.vocab_ids] for head in logits]

    def save(self, folder: Path) -> None:
        self.module.save(folder, dtype=SAVED_DTYPE)
