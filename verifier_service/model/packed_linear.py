"""Linear layers with prepacked or small weights: on a CPU, a few rows then cost hardly more than one.

    PanelLinear   our own kernel
    PackedLinear  oneDNN's layout, on CPUs without a C++ compiler
    Int8Linear    torch's product with int8 weights, there
    Fp8Linear     torch's product in FP8, where a device has one, and on a CPU
    PlainLinear   torch's own, elsewhere

oneDNN adds in another order from some number of rows on: a row's numbers depend on the other rows. A plain float32
linear over 4 to 8 rows takes two to three times as long as over 1; prepacked, both run at memory speed. This decides
whether verifying a draft is free on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from outrider.verifier_service.cpu.kernels import Product, address_of, load_kernels
from outrider.verifier_service.model.config import Quantization

# oneDNN picks the layout for this number of rows; 8 was best or equal for 1 to 512 rows
LAYOUT_ROWS = 8
MAX_CACHED_SHAPES = 64  # about ten row counts of one model
CHANNELS = 16  # per panel, as in cpu/linear.cpp
INPUTS_PER_STEP = {torch.float32: 1, torch.bfloat16: 2, torch.int8: 2}  # of a weight
TILE_INPUTS = 32  # a panel's inputs are padded to a multiple of them, but for float32
FP8_MULTIPLE = 16  # of a weight's rows and columns, for torch's product on a device
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
INT8_INPUTS = 16  # torch's product with int8 reads so many numbers of a bfloat16 row at a time, also beyond its end
MIN_WEIGHTS = 1 << 17  # smaller weights stay in the processor's cache, and the plain call is shorter


def bound_shape_caches() -> None:
    """Bound oneDNN's and PyTorch's caches of linears by shape; call before the first linear runs.

    Each keeps its primitives for the last 1024 shapes, and nearly every step of a busy engine has another row count:
    measured, 0.6 MB per row count for three layers, whatever the weights' size. Both are configured by environment
    variables only; a user's own values stay.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(MAX_CACHED_SHAPES))


class PackedLinear(nn.Module):
    """A CPU linear that keeps only oneDNN's packed copy of its weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        # a plain attribute: oneDNN's opaque tensors can be neither parameters nor saved
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAYOUT_ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.out_features)
        return torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")


class PanelLinear(nn.Module):
    """A CPU linear of `cpu/linear.cpp` that keeps only its panels; a row's output does not depend on other rows."""

    def __init__(
        self,
        weight: torch.Tensor,  # [out_features, in_features] of `dtype`, or int8 with scales
        bias: torch.Tensor | None = None,
        *,
        dtype: torch.dtype,
        scales: torch.Tensor | None = None,  # [out_features]
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        kernels = load_kernels(dtype)
        assert kernels is not None
        self._dtype, self._multiply = dtype, kernels.linear[weight.dtype]
        self._panels = to_panels(weight.detach())
        self._bias = None if bias is None else bias.detach().float()
        self._scales = None if scales is None else scales.float().contiguous()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        assert rows.dtype == self._dtype, (rows.dtype, self._dtype)  # the kernel gets addresses only
        packed = rows if rows.dim() == 2 else rows.reshape(-1, self.in_features)
        if packed.stride(1) != 1:
            packed = packed.contiguous()
        output = torch.empty((*rows.shape[:-1], self.out_features), dtype=rows.dtype)
        self._multiply(
            *(self.in_features, self.out_features, self._panels.data_ptr()),
            *(None if own is None else own.data_ptr() for own in (self._scales, self._bias)),
            *(packed.data_ptr(), output.data_ptr(), packed.shape[0], packed.stride(0), torch.get_num_threads()),
        )
        return output

    def product(self) -> Product:
        """Return what `cpu/layer.cpp` multiplies with; it holds addresses, which are this layer's."""
        parts = {"panels": self._panels, "scales": self._scales, "bias": self._bias}
        addresses = {name: None if part is None else part.data_ptr() for name, part in parts.items()}
        multiply = address_of(self._multiply)
        return Product(multiply, **addresses, in_features=self.in_features, out_features=self.out_features)


def to_panels(weight: torch.Tensor) -> torch.Tensor:
    """Lay out [out_features, in_features] as [panels, steps, CHANNELS, inputs of a step], padded to whole ones."""
    inputs_per_step = INPUTS_PER_STEP[weight.dtype]
    channels, inputs = -weight.shape[0] % CHANNELS, -weight.shape[1] % (TILE_INPUTS if inputs_per_step == 2 else 1)
    whole = F.pad(weight, (0, inputs, 0, channels)) if channels or inputs else weight
    return whole.view(-1, CHANNELS, whole.shape[1] // inputs_per_step, inputs_per_step).transpose(1, 2).contiguous()


class PlainLinear(nn.Module):
    """A linear with torch's layout."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return F.linear(rows, self.weight, self.bias)


class Int8Linear(nn.Module):
    """A linear with an int8 weight, for CPUs without our own kernel."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self._missing = -weight.shape[1] % INT8_INPUTS
        self.weight = F.pad(weight, (0, self._missing)) if self._missing else weight
        self.scales, self.bias = scales, bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.weight.shape[0])
        whole = F.pad(rows, (0, self._missing)) if self._missing else rows
        packed, scales = whole.reshape(-1, self.weight.shape[1]), self.scales.to(rows.dtype)
        output = torch.ops.aten._weight_int8pack_mm(packed, self.weight, scales).view(*rows.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


class Fp8Linear(nn.Module):
    """A linear that multiplies in FP8: a scale for each row of its weight, and one for each token's row.

    As the dynamic activations of compressed-tensors and vLLM; rows are bfloat16.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.scales = to_fp8(weight)
        self.bias = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.weight.shape[0])
        codes, scales = to_fp8(rows.reshape(-1, rows.shape[-1]))
        by_row = F.ScalingType.RowWise
        sides = (codes, self.weight.t(), scales, by_row, self.scales.t(), by_row)
        output = F.scaled_mm(*sides, output_dtype=torch.bfloat16).view(*rows.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each row of [num_rows, size] to FP8 (E4M3): codes, and float32 scales [num_rows, 1]."""
    wide = rows.float()
    scales = wide.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / FP8_MAX
    return (wide / scales).to(torch.float8_e4m3fn), scales


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    quantization: Quantization | None = None,
    scales: torch.Tensor | None = None,
) -> nn.Module:
    """Build the fastest linear for a weight [out_features, in_features]; with `scales`, as `quantize`'s, in int8."""
    if quantization == "fp8" and all(size % FP8_MULTIPLE == 0 for size in weight.shape):
        return Fp8Linear(weight, bias)
    if quantization == "int8" or scales is not None:
        quantized, scales = quantize(weight, scales)
        if has_kernel(weight, torch.int8):
            return PanelLinear(quantized, bias, dtype=weight.dtype, scales=scales)
        return Int8Linear(quantized, scales, bias)
    if has_panels(weight):
        return PanelLinear(weight, bias, dtype=weight.dtype)
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)


def quantize(weight: torch.Tensor, scales: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to int8, symmetric per output channel: int8 [out_features, in_features], scales [out_features].

    As the weights in LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339); activations are not quantised. `scales` of a
    weight that was int8 before give it back, also where it went through bfloat16, whose error is half a step at most.
    """
    if scales is None:
        scales = weight.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight.float() / scales[:, None]).round_().clamp_(-128, 127).to(torch.int8), scales


def dequantized(weight: torch.Tensor, quantization: Quantization = "int8") -> torch.Tensor:
    """Return a weight rounded to int8 or FP8 precision, in its own dtype."""
    if quantization == "fp8":
        codes, by_row = to_fp8(weight)
        return (codes.float() * by_row).to(weight.dtype)
    quantized, scales = quantize(weight)
    return (quantized.float() * scales[:, None]).to(weight.dtype)


def has_panels(weight: torch.Tensor) -> bool:
    """Return whether our own kernel multiplies with a weight as it is."""
    return has_kernel(weight, weight.dtype)


def has_kernel(weight: torch.Tensor, held: torch.dtype) -> bool:
    """Return whether our own kernel multiplies rows of `weight`'s dtype with the weight stored as dtype `held`."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return weight.shape[1] % INPUTS_PER_STEP[held] == 0 and load_kernels(weight.dtype) is not None


def can_pack(weight: torch.Tensor) -> bool:
    """Return whether oneDNN's packing is possible and worthwhile."""
    if weight.device.type != "cpu" or weight.numel() < MIN_WEIGHTS:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_linears(model: nn.Module, keep: Iterable[torch.Tensor] = ()) -> int:
    """Replace every linear that gains from it, one by one, so that at most one weight exists twice; return how many.

    `keep`: weights with other users (a tied embedding).
    """
    kept = {id(weight) for weight in keep}
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and id(child.weight) not in kept
        and (has_panels(child.weight) or can_pack(child.weight))
    ]
    num_packed = 0
    while found:
        parent, name, linear = found.pop()
        setattr(parent, name, make_linear(linear.weight, linear.bias))
        num_packed += 1
    return num_packed
