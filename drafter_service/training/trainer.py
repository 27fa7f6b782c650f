"""Distil a student from its teacher: the embedded pair's recipe for any drafter, resumable.

A step depends on the weights, the optimizers and its number (windows depend on seed and number only). A checkpoint has
all three and torch's generator, so that a resumed run ends like an uninterrupted one. With a budget in minutes, the
learning rate follows the clock: a run on a busy machine is also annealed to the end.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.optim import AdamW

from outrider.drafter_service.training.corpus_windows import TokenStream
from outrider.drafter_service.training.muon import Muon
from outrider.drafter_service.training.notes import Notes
from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.precision import half_precision
from outrider.drafter_service.training.recipe import Optimizers, Progress, Recipe
from outrider.drafter_service.training.student import TaughtStudent

log = logging.getLogger(__name__)

MAX_GRAD_NORM = 1.0
TABLES = ("emb", "head")  # one row per token: not between hidden states, so not for Muon


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A number of steps or minutes, whichever ends first."""

    num_steps: int | None = None
    minutes: float = math.inf

    def __post_init__(self) -> None:
        if self.num_steps is None and math.isinf(self.minutes):
            raise ValueError("steps or minutes: one of them must be given")
        if self.minutes <= 0 or (self.num_steps is not None and self.num_steps < 1):
            raise ValueError("steps and minutes must be positive")

    def share_used(self, progress: Progress) -> float:
        """Return the used share of the budget; 1 or more: it is used up."""
        by_steps = 0.0 if self.num_steps is None else progress.step / self.num_steps
        return max(by_steps, progress.elapsed_s / (self.minutes * 60))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One training step, for the progress bar."""

    step: int
    loss: float
    share_used: float
    elapsed_s: float
    served: float | None = None  # tokens per verification of held-out prompts, last measured


class StudentOptimizers(Optimizers):
    """The embedded pair's optimizers over a student's parameters; output embeddings are AdamW's."""

    def __init__(self, module: nn.Module, recipe: Recipe) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        tables = {name for name, p in named if p.ndim != 2 or any(table in name for table in TABLES)}
        matrices = [p for name, p in named if name not in tables]
        vectors = [p for name, p in named if name in tables]
        self.optimizers = (
            Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay),
            AdamW(vectors, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )
        self.base_lrs = (recipe.matrix_lr, recipe.vector_lr)


def trained_s(checkpoint: Path) -> float:
    """Return the training seconds of a checkpoint; 0 without a checkpoint."""
    if not checkpoint.exists():
        return 0.0
    _, elapsed_s, _ = torch.load(checkpoint, map_location="cpu", weights_only=True)["progress"]
    return float(elapsed_s)


@dataclass(slots=True)
class Trainer:
    """Trains one student within a budget, with a checkpoint file."""

    student: TaughtStudent
    stream: TokenStream
    recipe: Recipe
    budget: Budget
    checkpoint: Path
    settings: Mapping[str, str]  # settings that a resumed run must not change
    objective: Objective = Objective.CE
    progress: Progress = field(default_factory=Progress)
    notes: Notes = field(init=False)

    def __post_init__(self) -> None:
        self.notes = Notes(self.student.teacher)

    def train(self, *, resume: bool) -> Iterator[StepReport]:
        """Train until the budget is used up; yield a report per step.

        Raises:
            ValueError: there is a checkpoint and `resume` is off, or its settings differ.
        """
        optimizers = StudentOptimizers(self.student.module, self.recipe)
        if resume and self.checkpoint.exists():
            self._load(optimizers)
        elif self.checkpoint.exists():
            raise ValueError(f"{self.checkpoint}: a run stopped here; resume it, or remove the file to start again")
        saved_at_s = self.progress.elapsed_s
        while (share := self.budget.share_used(self.progress)) < 1.0:
            yield self._step(optimizers, share)
            if self.progress.elapsed_s - saved_at_s > self.recipe.checkpoint_every_s:
                self._save(optimizers)
                saved_at_s = self.progress.elapsed_s
        self._save(optimizers)

    def _step(self, optimizers: Optimizers, share: float) -> StepReport:
        started_s = time.perf_counter()
        progress, phase = self.progress, self.recipe.phase(share)
        windows = self.stream.batch(progress.step, rows=phase.rows, window=phase.window, seed=self.recipe.seed)
        with half_precision(self.student.teacher.device):
            loss = self.student.loss(self.notes.lesson(windows), self.objective)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.module.parameters(), MAX_GRAD_NORM)
        optimizers.step(self.recipe.lr_scale(progress.step, share))
        progress.step += 1
        progress.num_tokens += windows.token_ids.numel()
        value = loss.item()  # waits for the device: the time below includes the step
        progress.elapsed_s += time.perf_counter() - started_s
        return StepReport(
            step=progress.step, loss=value, share_used=self.budget.share_used(progress), elapsed_s=progress.elapsed_s
        )

    def _save(self, optimizers: Optimizers) -> None:
        state = {
            "settings": dict(self.settings),
            "trained": {name: p.detach() for name, p in self.student.module.named_parameters() if p.requires_grad},
            "optimizers": optimizers.state_dict(),
            "progress": (self.progress.step, self.progress.elapsed_s, self.progress.num_tokens),
            "rng": torch.get_rng_state(),
        }
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def _load(self, optimizers: Optimizers) -> None:
        state = torch.load(self.checkpoint, map_location=self.student.teacher.device, weights_only=True)
        for name in sorted(self.settings.keys() | state["settings"].keys()):
            ours, theirs = self.settings.get(name), state["settings"].get(name)
            if ours != theirs:
                raise ValueError(f"{name}: {ours} does not go on with the run in {self.checkpoint}, which had {theirs}")
        self.student.module.load_state_dict(state["trained"], strict=False)  # frozen parameters are the target's
        optimizers.load_state_dict(state["optimizers"])
        step, elapsed_s, num_tokens = state["progress"]
        self.progress = Progress(step=step, elapsed_s=elapsed_s, num_tokens=num_tokens)
        torch.set_rng_state(state["rng"].cpu())
        log.info("resuming %s at step %d", self.checkpoint, step)
