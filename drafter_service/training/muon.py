"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) in the device's fast precision.

`torch.optim.Muon` always orthogonalises in bfloat16: minutes per step on a CPU without bfloat16 instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from outrider.drafter_service.training.precision import is_fast_in_half_precision

MOMENTUM = 0.95
# of the quintic iteration with the steepest slope at zero: singular values end between 0.5 and 1.5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPSILON = 1e-7


class Muon(Optimizer):
    """Momentum with orthogonalised updates, for weight matrices [rows, columns] between hidden states."""

    def __init__(self, params: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take one step; a closure is not called."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - MOMENTUM)
        update = orthogonal(gradient.lerp(momentum, MOMENTUM))  # Nesterov momentum
        rows, columns = parameter.shape
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(update, alpha=-lr * max(1.0, rows / columns) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Bring all singular values of a matrix near one, by Newton-Schulz iterations."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide.to(torch.bfloat16 if is_fast_in_half_precision(matrix.device) else torch.float32)
    wide = wide / wide.norm().clamp_min(EPSILON)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.T if is_tall else wide).to(matrix.dtype)
