"""Layouts of quantised weights, one record each: which tensors hold a weight, and what numbers they stand for.

    weight [rows, columns]  =  (codes - zero points) * scales

Codes are integers, or floats of 4 or 8 bits; small ones lie packed in wider integers. A scale stands for a block of
rows and columns. Activations stay as they are, whatever the checkpoint says of them: the products are at least as
precise as those that it was made for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
Parts = Mapping[str, torch.Tensor]  # by the suffix of their names
Axes = tuple[int | None, ...]  # for each dimension of a weight, the part's along it; None: it has none

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which four bits of a word hold each of eight neighbours
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 (OCP Microscaling Formats, 2023); bit 3 is the sign
E8M0_BIAS = 127
INT8_SCALES = ".weight_scale"
FLOAT8 = ("F8_E4M3", "F8_E5M2")
WORDS = (8, 4, 16)  # numbers of 4, 8, 2 bits in one


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How some checkpoints hold a weight."""

    name: str
    codes: str  # suffix of the tensor with the codes
    needs: str  # suffix of another: where both are, the weight is quantised
    dtypes: tuple[str, ...]  # of the codes, in safetensors' names
    dequantize: Callable[[Parts, Shape, Sequence[int]], torch.Tensor]  # parts, the weight's shape, sizes of blocks
    shape: Callable[[Shapes], Shape]  # the weight's
    plain: str = ".weight"  # suffix of the weight that they stand for
    required: tuple[str, ...] = ()  # suffixes of what else there must be
    optional: tuple[str, ...] = ()
    axes: Mapping[str, Axes] = field(default_factory=dict)  # of parts that lie otherwise than the weight
    index: str = ""  # suffix of the tensor that says which scale each column has; where it is, scales are not cut

    def cut(self, shapes: Shapes, shape: Shape, blocks: Sequence[int], dim: int, start: int, stop: int) -> Cut:
        """Return what to read of each part for [start, stop) of a weight's dimension: whole blocks, whole words."""
        steps = {suffix: self._step(suffix, shapes, shape, blocks, dim) for suffix in shapes}
        common = math.lcm(*(size for _, size in steps.values()))
        first, last = start // common * common, min(-(-stop // common) * common, shape[dim])
        cut = {suffix: (axis, size) for suffix, (axis, size) in steps.items() if axis is not None}
        ranges = {suffix: (axis, first // size, -(-last // size)) for suffix, (axis, size) in cut.items()}
        return Cut(ranges=ranges, first=first, last=last)

    def _step(
        self, suffix: str, shapes: Shapes, shape: Shape, blocks: Sequence[int], dim: int
    ) -> tuple[int | None, int]:
        """Return the dimension in which a part is cut (None: in none), and how many rows or columns a number is for."""
        own, axes = shapes[suffix], self.axes.get(suffix, tuple(range(len(shape))))
        axis = axes[dim]
        if axis is None or axis >= len(own) or (own[axis] == 1 and shape[dim] > 1):
            return None, 1
        if self.index in shapes and dim == 1 and suffix not in (self.codes, self.index):
            return None, 1
        return axis, step(shape[dim], own[axis], (*blocks, *WORDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What to read of a weight's parts."""

    ranges: Mapping[str, tuple[int, int, int]]  # of a part's dimension, from, to; others are read whole
    first: int  # of the weight's dimension: what the read parts stand for
    last: int


def step(size: int, count: int, blocks: Sequence[int]) -> int:
    """Return how many of `size` rows or columns each of `count` numbers stands for; the last may stand for fewer.

    `blocks`: what it may be where it does not follow from both. Raises `ValueError`.
    """
    if count in (1, size):
        return size // count
    found = next((block for block in blocks if block and -(-size // block) == count), size // count)
    if -(-size // found) != count:
        raise ValueError(f"{count} numbers cannot stand for {size} rows or columns in blocks of {list(blocks)}")
    return found


def spread(scales: torch.Tensor, shape: Shape, blocks: Sequence[int]) -> torch.Tensor:
    """Return numbers for a weight of this shape: each dimension has one, or as many as the weight."""
    wide = scales.float()
    if wide.numel() == 1:
        return wide.reshape(1)
    wide = wide.view(*wide.shape, *(1 for _ in shape[wide.dim() :]))
    for dim, size in enumerate(shape):
        if (count := wide.shape[dim]) not in (1, size):
            wide = wide.repeat_interleave(step(size, count, blocks), dim=dim).narrow(dim, 0, size)
    return wide


def scaled(codes: torch.Tensor, scales: torch.Tensor, blocks: Sequence[int]) -> torch.Tensor:
    """Multiply float32 codes by their scales, in place where the blocks are whole: no scale is written out for each."""
    exact = _numbers_of(scales)
    if exact.dim() == codes.dim() == 2:
        steps = [step(size, count, blocks) for size, count in zip(codes.shape, exact.shape, strict=True)]
        if all(size == each * count for size, each, count in zip(codes.shape, steps, exact.shape, strict=True)):
            codes.unflatten(1, (-1, steps[1])).unflatten(0, (-1, steps[0])).mul_(exact[:, None, :, None])
            return codes
    return codes * spread(exact, tuple(codes.shape), blocks)


def _numbers_of(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; bytes are exponents (E8M0)."""
    return (scales.float() - E8M0_BIAS).exp2() if scales.dtype == torch.uint8 else scales.float()


def unpack(words: torch.Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Return the unsigned numbers of `bits` bits in int32 words along `dim`, lowest bits first, or in this order."""
    places = range(WORD_BITS // bits) if order is None else order
    shifts = torch.tensor(places, device=words.device, dtype=torch.int32) * bits
    shifts = shifts.view(*(-1 if axis == dim + 1 else 1 for axis in range(words.dim() + 1)))
    return ((words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)).flatten(dim, dim + 1)


def unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of bytes that hold two each, low bits first: [..., n] to [..., 2 * n]."""
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=packed.device)
    return values[torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2).int()]


# --- FP8 and INT8: a code is a number ---


def _numbers(scales: str) -> Callable[[Parts, Shape, Sequence[int]], torch.Tensor]:
    def dequantize(parts: Parts, shape: Shape, blocks: Sequence[int]) -> torch.Tensor:
        codes = parts[".weight"].float()
        if (zeros := parts.get(".weight_zero_point")) is not None:
            codes = codes - spread(zeros.float(), shape, blocks)
        return scaled(codes, parts[scales], blocks)

    return dequantize


def _numbers_in(name: str, scales: str, dtypes: tuple[str, ...], optional: tuple[str, ...] = ()) -> Layout:
    return Layout(
        name=name,
        codes=".weight",
        needs=scales,
        dtypes=dtypes,
        dequantize=_numbers(scales),
        shape=lambda shapes: shapes[".weight"],
        optional=optional,
    )


FP8_INVERSE = _numbers_in("FP8", ".weight_scale_inv", FLOAT8)  # DeepSeek's name and transformers'; it multiplies
FP8 = _numbers_in("FP8", ".weight_scale", FLOAT8)
INT8 = _numbers_in("INT8", INT8_SCALES, ("I8",), optional=(".weight_zero_point",))


# --- INT4 and INT8 packed into words ---


def _grouped(
    codes: torch.Tensor,  # [rows, columns]
    zeros: torch.Tensor | int,  # [rows, groups]
    scales: torch.Tensor,  # [rows, groups]
    groups: torch.Tensor | None,  # [columns]
    blocks: Sequence[int],
) -> torch.Tensor:
    """Return (codes - zeros) * scales, each group's for its columns: in order, or by `groups`."""
    shape = tuple(codes.shape)
    if groups is not None:
        scales = scales[:, groups.long()]
        zeros = zeros if isinstance(zeros, int) else zeros[:, groups.long()]
    lowered = codes - (zeros if isinstance(zeros, int) else spread(zeros, shape, blocks))
    return scaled(lowered.float(), scales, blocks)


def _pack_quantized(parts: Parts, shape: Shape, blocks: Sequence[int]) -> torch.Tensor:
    words = parts[".weight_packed"]
    bits = WORD_BITS // step(shape[1], words.shape[1], WORDS)
    codes, half = unpack(words, bits, 1)[:, : shape[1]], 1 << (bits - 1)
    zeros: torch.Tensor | int = half
    if (packed := parts.get(".weight_zero_point")) is not None:
        zeros = unpack(packed, bits, 0)[: shape[0]]
    return _grouped(codes, zeros, parts[".weight_scale"], parts.get(".weight_g_idx"), blocks)


def gptq(bits: int, zero_offset: int) -> Layout:
    """Return GPTQ's layout (Frantar et al., 2023, arXiv:2210.17323): a weight's transpose, packed along its columns.

    `zero_offset`: what is taken off zero points before they are packed; 1, but for the second version of the format.
    """

    def dequantize(parts: Parts, shape: Shape, blocks: Sequence[int]) -> torch.Tensor:
        codes = unpack(parts[".qweight"], bits, 0).T
        zeros = (unpack(parts[".qzeros"], bits, 1).T + zero_offset) & ((1 << bits) - 1)
        return _grouped(codes, zeros, parts[".scales"].T, parts.get(".g_idx"), blocks)

    return Layout(
        name=f"INT{bits} (GPTQ)",
        codes=".qweight",
        needs=".scales",
        dtypes=("I32",),
        dequantize=dequantize,
        shape=lambda shapes: (shapes[".scales"][1], shapes[".qweight"][0] * WORD_BITS // bits),
        required=(".qzeros",),
        optional=(".g_idx",),
        axes={".qweight": (1, 0), ".scales": (1, 0), ".qzeros": (1, 0), ".g_idx": (None, 0)},
        index=".g_idx",
    )


def _awq(parts: Parts, shape: Shape, blocks: Sequence[int]) -> torch.Tensor:
    codes, zeros = (unpack(parts[suffix], 4, 1, AWQ_ORDER).T for suffix in (".qweight", ".qzeros"))
    return _grouped(codes, zeros, parts[".scales"].T, None, blocks)


AWQ = Layout(  # Lin et al., 2024, arXiv:2306.00978: a weight's transpose, packed along its rows
    name="INT4 (AWQ)",
    codes=".qweight",
    needs=".scales",
    dtypes=("I32",),
    dequantize=_awq,
    shape=lambda shapes: (shapes[".scales"][1], shapes[".qweight"][0]),
    required=(".qzeros",),
    axes=dict.fromkeys((".qweight", ".scales", ".qzeros"), (1, 0)),
)
PACK_QUANTIZED = Layout(
    name="packed INT",
    codes=".weight_packed",
    needs=".weight_scale",
    dtypes=("I32",),
    dequantize=_pack_quantized,
    shape=lambda shapes: shapes[".weight_shape"],
    required=(".weight_shape",),
    optional=(".weight_zero_point", ".weight_g_idx"),
    axes={".weight_g_idx": (None, 0), ".weight_shape": (None, None)},
    index=".weight_g_idx",
)


# --- FP4, two in a byte ---


def _fp4(codes: str, factor: str = "", divisor: str = "") -> Callable[[Parts, Shape, Sequence[int]], torch.Tensor]:
    """`factor`, `divisor`: a number for the whole weight."""

    def dequantize(parts: Parts, shape: Shape, blocks: Sequence[int]) -> torch.Tensor:
        scales = _numbers_of(parts[".weight_scale"])
        if factor:
            scales = scales * parts[factor].float()
        if divisor:
            scales = scales / parts[divisor].float()
        return scaled(unpack_fp4(parts[codes]), scales, blocks)

    return dequantize


def _double_width(suffix: str) -> Callable[[Shapes], Shape]:
    return lambda shapes: (*shapes[suffix][:-1], 2 * shapes[suffix][-1])


NVFP4 = Layout(  # compressed-tensors' names
    name="NVFP4",
    codes=".weight_packed",
    needs=".weight_global_scale",
    dtypes=("U8",),
    dequantize=_fp4(".weight_packed", divisor=".weight_global_scale"),
    shape=_double_width(".weight_packed"),
    required=(".weight_scale",),
)
NVFP4_MODELOPT = Layout(
    name="NVFP4",
    codes=".weight",
    needs=".weight_scale_2",
    dtypes=("U8",),
    dequantize=_fp4(".weight", factor=".weight_scale_2"),
    shape=_double_width(".weight"),
    required=(".weight_scale",),
)
MXFP4_PACKED = Layout(
    name="MXFP4",
    codes=".weight_packed",
    needs=".weight_scale",
    dtypes=("U8",),
    dequantize=_fp4(".weight_packed"),
    shape=_double_width(".weight_packed"),
)


def _mxfp4(parts: Parts, shape: Shape, blocks: Sequence[int]) -> torch.Tensor:
    return (unpack_fp4(parts["_blocks"]) * _numbers_of(parts["_scales"])[..., None]).flatten(2).transpose(1, 2)


MXFP4 = Layout(  # gpt-oss: [experts, rows, blocks, 16 bytes], of which the library's modules have the transpose
    name="MXFP4",
    codes="_blocks",
    needs="_scales",
    dtypes=("U8",),
    dequantize=_mxfp4,
    shape=lambda shapes: (shapes["_blocks"][0], shapes["_blocks"][2] * 32, shapes["_blocks"][1]),
    plain="",
    axes=dict.fromkeys(("_blocks", "_scales"), (0, 2, 1)),
)
