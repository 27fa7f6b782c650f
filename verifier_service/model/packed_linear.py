"""Linear layers whose weights are laid out once: on a CPU a few rows then cost hardly more than one.

    PanelLinear   our own kernel, where the processor has AVX-512 (and no AMX, for bfloat16)
    PackedLinear  oneDNN's layout, on other CPUs
    Int8Linear    torch's product with int8 weights, on CPUs where our own kernel does not run
    PlainLinear   as torch has it, elsewhere

A plain float32 linear over 4 to 8 rows takes two to three times as long as over 1; laid out, both run at memory speed.
That alone decides whether verifying a draft is free on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn

from outrider.verifier_service.cpu.kernels import load_kernels
from outrider.verifier_service.model.config import Quantization

# oneDNN picks the layout for the row count it is told; 8 was best or equal for everything from 1 to 512 rows
LAYOUT_ROWS = 8
MAX_CACHED_SHAPES = 64  # about ten row counts of one model
CHANNELS = 16  # of a panel, as in cpu/linear.cpp
INPUTS_PER_STEP = {torch.float32: 1, torch.bfloat16: 2}
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


class PanelLinear(nn.Module):
    """A CPU linear of `cpu/linear.cpp`, which owns only its panels; a row's output depends on that row alone."""

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
        self._panels = to_panels(weight.detach(), inputs_per_step=INPUTS_PER_STEP[dtype])
        self._bias = None if bias is None else bias.detach().float()
        self._scales = None if scales is None else scales.float().contiguous()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        assert rows.dtype == self._dtype, (rows.dtype, self._dtype)  # the kernel reads what the address points at
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


def to_panels(weight: torch.Tensor, *, inputs_per_step: int) -> torch.Tensor:
    """Lay out [out_features, in_features] as [panels, steps, CHANNELS, inputs of a step], the last panel filled up."""
    missing = -weight.shape[0] % CHANNELS
    whole = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    return whole.view(-1, CHANNELS, weight.shape[1] // inputs_per_step, inputs_per_step).transpose(1, 2).contiguous()


class PlainLinear(nn.Module):
    """A linear whose weight stays as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        return F.linear(rows, self.weight, self.bias)


class Int8Linear(nn.Module):
    """A linear of an int8 weight where our own kernel does not run."""

    def __init__(self, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight, self.scales, self.bias = weight, scales, bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        if rows.numel() == 0:
            return rows.new_empty(*rows.shape[:-1], self.weight.shape[0])
        packed, scales = rows.reshape(-1, self.weight.shape[1]), self.scales.to(rows.dtype)
        output = torch.ops.aten._weight_int8pack_mm(packed, self.weight, scales).view(*rows.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, quantization: Quantization | None = None
) -> nn.Module:
    """Make the fastest linear of a weight [out_features, in_features]."""
    if quantization == "int8":
        quantized, scales = quantize(weight)
        if has_kernel(weight, torch.int8):
            return PanelLinear(quantized, bias, dtype=weight.dtype, scales=scales)
        return Int8Linear(quantized, scales, bias)
    if has_panels(weight):
        return PanelLinear(weight, bias, dtype=weight.dtype)
    return PackedLinear(weight, bias) if can_pack(weight) else PlainLinear(weight, bias)


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a weight to int8, symmetric per output channel: int8 [out_features, in_features], scales [out_features].

    The weights' half of LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339): activations stay as they are.
    """
    scales = weight.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight.float() / scales[:, None]).round_().to(torch.int8), scales


def dequantized(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight that its int8 form stands for."""
    quantized, scales = quantize(weight)
    return (quantized.float() * scales[:, None]).to(weight.dtype)


def has_panels(weight: torch.Tensor) -> bool:
    """Tell whether our own kernel multiplies a weight, and is the fastest: for bfloat16 AMX is faster, by oneDNN."""
    is_for_amx = weight.dtype == torch.bfloat16 and torch.cpu.get_capabilities().get("amx_bf16")
    return not is_for_amx and has_kernel(weight, weight.dtype)


def has_kernel(weight: torch.Tensor, held: torch.dtype) -> bool:
    """Tell whether our own kernel multiplies rows like a weight with that weight held in a dtype."""
    if weight.device.type != "cpu" or weight.dtype not in INPUTS_PER_STEP:
        return False
    kernels = load_kernels(weight.dtype)
    is_whole = weight.shape[1] % INPUTS_PER_STEP[weight.dtype] == 0
    return kernels is not None and held in kernels.linear and is_whole


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
