"""Distil a one-layer head on its own states: training-time test (Li et al. 2025, arXiv 2503.01840).

A served head reads the target's states only up to the begin of its draft, then its own. So it is trained on its own
states: the first step reads the target's, each later step the step before.

root s, step j        input state                 position   attends to
0                     the target's, of token s    s          step 0 of roots 0..s
1                     step 0's own, of root s     s + 1      step 0 of roots 0..s, itself
2                     step 1's own, of root s     s + 2      step 0 of roots 0..s, step 1 of root s, itself

All roots of a window are unrolled at once: in each step after the first, every root has one entry. The recipe is
EAGLE-3's; EAGLE-1 and MTP heads, which also continue states, are trained by it too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.training.objectives import Objective, draft_loss
from outrider.drafter_service.training.student import SAVED_DTYPE, num_roots
from outrider.drafter_service.training.teacher import Lesson, SomeTarget

DEEP_SHARE = 0.25  # of a window's roots, drawn at random, learn after the first step: those steps take most of the time


class UnrolledStudent(Generic[SomeTarget]):
    """A head, unrolled for `num_positions` steps in training."""

    def __init__(
        self, head: DraftHead, teacher: SomeTarget, *, num_positions: int, write: Callable[[Any, Path], None]
    ) -> None:
        """`write` writes the head to a folder, in its public format."""
        self.module = head
        self.teacher = teacher.tapping(head.taps)
        self.num_positions = num_positions
        self.vocab_ids = head.target_ids
        self._write = write

    def loss(self, lesson: Lesson, objective: Objective = Objective.CE) -> Tensor:
        """Return the loss of the first step over all roots, and of later steps over some."""
        count = num_roots(lesson, self.num_positions)
        drawn = torch.randperm(count)[: max(1, int(count * DEEP_SHARE))].sort().values
        deep = drawn.to(lesson.token_ids.device)
        law = lesson.law(self.vocab_ids)
        return draft_loss(self._unroll(lesson, deep), law, objective, deep=deep)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Unroll the head from every root: [rows, num_roots, draft_vocab_size] per step."""
        return self._unroll(lesson, torch.arange(num_roots(lesson, self.num_positions), device=lesson.token_ids.device))

    def _unroll(self, lesson: Lesson, deep: Tensor) -> list[Tensor]:
        """Unroll the head: the first step from every root, later ones from `deep`, int64 [num_deep]."""
        count = num_roots(lesson, self.num_positions)
        roots = torch.arange(count, device=lesson.token_ids.device)
        hidden = self.module.combine(lesson.states[:, :count])  # [rows, num_roots, hidden_size]
        attend = UnrolledAttention(deep)
        logits: list[Tensor] = []
        for step in range(self.num_positions):
            token_ids = lesson.token_ids[:, 1 + step + roots]  # [rows, num_roots]
            output, hidden = self.module(token_ids, hidden, (roots + step)[None], attend)
            logits.append(self.module.logits(output))
            if step == 0:
                roots, hidden = deep, hidden[:, deep]
        return logits

    def save(self, folder: Path) -> None:
        self._write(copy.deepcopy(self.module).to(SAVED_DTYPE), folder)


@dataclass(slots=True)
class UnrolledAttention:
    """Attention of all roots' steps: causal over the first step's entries, and to the root's own later entries."""

    deep: Tensor  # int64 [num_deep]; roots with later steps
    keys: list[Tensor] = field(default_factory=list)  # one per step: [rows, num_heads, num_roots, head_dim]
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add a step's entries and attend: query [rows, num_heads, num_roots, head_dim] -> heads second to last."""
        groups = query.shape[1] // key.shape[1]
        self.keys.append(key.repeat_interleave(groups, dim=1))
        self.values.append(value.repeat_interleave(groups, dim=1))
        query = query * query.shape[-1] ** -0.5
        count = self.keys[0].shape[2]
        past = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
        if len(self.keys) > 1:
            past = past[self.deep]
        shared = (query @ self.keys[0].transpose(-1, -2)).masked_fill(~past, float("-inf"))  # [..., num_roots] of roots
        own = [(query * key).sum(-1, keepdim=True) for key in self.keys[1:]]  # [..., 1] of each later step
        weights = torch.cat([shared, *own], dim=-1).float().softmax(-1).to(value.dtype)
        output = weights[..., :count] @ self.values[0]
        for step, values in enumerate(self.values[1:]):
            output = output + weights[..., count + step, None] * values
        return output.transpose(1, 2)
