"""The training recipe: phases of a time budget, learning rates, Muon and AdamW."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer

from outrider.drafter_service.training.muon import Muon


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Batches of `rows` windows of `window` tokens, until the share `until` of the budget."""

    until: float
    rows: int
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The recipe of one model. Windows grow at the end, so that training covers positions up to 2,048."""

    minutes: float
    matrix_lr: float = 0.02  # Muon
    vector_lr: float = 4e-3  # AdamW: embeddings and norms
    weight_decay: float = 0.05
    warm_up_steps: int = 20
    cool_down: float = 0.4  # share of the budget over which the learning rate falls linearly to zero
    test_share: float = 0.25  # rows drawn from the library's tests
    penalty_from: float = 0.7  # share of the budget: first the model must learn to write, then not to loop
    phases: tuple[Phase, ...] = (
        Phase(until=0.70, rows=16, window=256),
        Phase(until=0.92, rows=4, window=1024),
        Phase(until=1.00, rows=2, window=2048),
    )
    checkpoint_every_s: float = 150.0
    log_every: int = 25
    seed: int = 0

    def phase(self, elapsed_share: float) -> Phase:
        return next((phase for phase in self.phases if elapsed_share < phase.until), self.phases[-1])

    def is_penalised(self, elapsed_share: float) -> bool:
        return elapsed_share >= self.penalty_from

    def lr_scale(self, step: int, elapsed_share: float) -> float:
        warm_up = min(1.0, (step + 1) / self.warm_up_steps)
        return warm_up * min(1.0, max(0.0, 1.0 - elapsed_share) / self.cool_down)


class Optimizers:
    """Muon on the weight matrices, AdamW on embeddings and norms, one learning-rate scale for both."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        vectors = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.optimizers: tuple[Optimizer, ...] = (
            Muon(matrices, lr=recipe.matrix_lr, weight_decay=recipe.weight_decay),
            AdamW(vectors, lr=recipe.vector_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )
        self.base_lrs = (recipe.matrix_lr, recipe.vector_lr)

    def step(self, scale: float) -> None:
        for optimizer, base_lr in zip(self.optimizers, self.base_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base_lr * scale
            optimizer.step()
            optimizer.zero_grad()

    def state_dict(self) -> list[dict]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


@dataclass(slots=True)
class Progress:
    """A run's progress; saved with every checkpoint."""

    step: int = 0
    elapsed_s: float = 0.0
    num_tokens: int = 0
