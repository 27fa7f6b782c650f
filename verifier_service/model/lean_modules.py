"""Exact replacements for parts of the library's models that cost more calls than they need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn

FUSED_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FastRMSNorm(nn.Module):
    """x / rms(x) * weight in one call; for float32 the same as the library's six."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps
        self._shape = tuple(weight.shape)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self._shape, self.weight, self.eps)


class Shelf:
    """What a fused linear has computed for the projections that follow; no module, whose attributes are slow to set."""

    __slots__ = ("parts", "rows")

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None
        self.parts: tuple[torch.Tensor, ...] = ()


class LeadingProjection(nn.Module):
    """Computes the outputs of several linears over one input; the others fetch theirs from the shelf."""

    def __init__(self, fused: nn.Linear, sizes: Sequence[int]) -> None:
        super().__init__()
        self.fused, self._sizes, self.shelf = fused, list(sizes), Shelf()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.shelf.rows = rows
        self.shelf.parts = self.fused(rows).split(self._sizes, dim=-1)
        return self.shelf.parts[0]


class FollowingProjection(nn.Module):
    """Fetches its output from the shelf; asserts that it was computed from these very rows."""

    def __init__(self, shelf: Shelf, index: int, *, is_last: bool) -> None:
        super().__init__()
        self._shelf, self._index, self._is_last = shelf, index, is_last

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        assert rows is self._shelf.rows, "fused projections must share their input"
        part = self._shelf.parts[self._index]
        if self._is_last:
            self._shelf.rows, self._shelf.parts = None, ()
        return part


def replace_rms_norms(model: nn.Module) -> None:
    """Replace float32 norms of the plain kind; the caller knows that the architecture's norm is of that kind."""
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if type(child).__name__.endswith("RMSNorm") and child.weight.dtype == torch.float32:
                setattr(parent, name, FastRMSNorm(child.weight, child.variance_epsilon))


def fuse_siblings(model: nn.Module) -> None:
    """Make one linear of those that read the same input, where a module calls them in this order."""
    for parent in list(model.modules()):
        for names in FUSED_SIBLINGS:
            linears = [linear for name in names if _is_plain(linear := getattr(parent, name, None))]
            if len(linears) == len(names):
                _fuse(parent, names, linears)


def _is_plain(linear: object) -> TypeGuard[nn.Linear]:
    return type(linear) is nn.Linear


def _fuse(parent: nn.Module, names: Sequence[str], linears: Sequence[nn.Linear]) -> None:
    has_bias = [linear.bias is not None for linear in linears]
    if any(has_bias) != all(has_bias):
        return
    sizes = [linear.out_features for linear in linears]
    fused = nn.Linear(linears[0].in_features, sum(sizes), bias=all(has_bias), device="meta")
    fused.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if all(has_bias):
        fused.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    leader = LeadingProjection(fused, sizes)
    setattr(parent, names[0], leader)
    for index, name in enumerate(names[1:], start=1):
        is_last = index == len(names) - 1
        setattr(parent, name, FollowingProjection(leader.shelf, index, is_last=is_last))
