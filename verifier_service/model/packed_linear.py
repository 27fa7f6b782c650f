"""Linear layers whose weights oneDNN has laid out once: on a CPU a few rows then cost hardly more than one.

A plain float32 linear over 4 to 8 rows takes two to three times as long as over 1; with prepacked weights both run at
memory speed. That alone decides whether verifying a draft is free on a CPU.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

# oneDNN picks the layout for the row count it is told; 8 was best or equal for everything from 1 to 512 rows
LAYOUT_ROWS = 8
MAX_CACHED_SHAPES = 64  # about ten row counts of one model
MIN_WEIGHTS = 1 << 17  # below this the weights sit in the cache anyway and the plain call is shorter


def bound_shape_caches() -> None:
    """Keep this process from remembering too many shapes of linears; to be called before it runs the first one.

    oneDNN and PyTorch's layer above it each keep what they made for the last 1024 shapes, and nearly every step of a
    busy engine has a row count of its own: measured, 0.6 MB for each row count of three layers whatever the weights'
    size. They read the environment alone; what a user has set there stays.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(MAX_CACHED_SHAPES))


class PackedLinear(nn.Module):
    """A CPU linear that owns only the packed copy of its weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        # a plain attribute: oneDNN's opaque tensors can be neither parameters of inference nor saved
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAYOUT_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


class PlainLinear(nn.Module):
    """A linear whose weight stays as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return F.linear(rows, self.weight, self.bias)


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Module:
    """Make the faster linear of a weight [out_features, in_features]."""
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)


def can_pack(weight: torch.Tensor) -> bool:
    """Tell whether packing is possible and pays."""
    if weight.device.type != "cpu" or weight.numel() < MIN_WEIGHTS:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linears(model: nn.Module, keep: Iterable[torch.Tensor] = ()) -> int:
    """Replace every linear that gains from it, never holding more than one weight twice; return how many.

    `keep` are weights that something else uses too (a tied embedding).
    """
    kept = {id(weight) for weight in keep}
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and can_pack(child.weight) and id(child.weight) not in kept
    ]
    num_packed = 0
    while found:
        parent, name, linear = found.pop()
        setattr(parent, name, PackedLinear(linear.weight, linear.bias))
        num_packed += 1
    return num_packed


def measure_row_cost(
    forward: Callable[[int], object],
    num_rows: int = 5,
    repeats: int = 15,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return how many times as long `forward(num_rows)` takes as `forward(1)`: the price of verifying a draft.

    Interleaves the two and compares medians, so that a busy machine slows both alike.
    """
    one_s: list[float] = []
    many_s: list[float] = []
    forward(1), forward(num_rows)
    for _ in range(repeats):
        for count, samples_s in ((1, one_s), (num_rows, many_s)):
            begin_s = clock()
            forward(count)
            samples_s.append(clock() - begin_s)
    return sorted(many_s)[repeats // 2] / sorted(one_s)[repeats // 2]
