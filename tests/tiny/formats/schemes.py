"""Tiny checkpoints in the quantised layouts that people publish, and the weights that they stand for.

Codes are drawn, packed number by number, and dequantised number by number: nothing here is the code under test.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tiny.models import make_checkpoint

QUANTIZED = r"(_proj|\.(gate_up|fc1|fc2|dense|c_\w+)|experts\.\d+\.\w+)\.weight$"  # neither embedding, head nor router
Tensors = dict[str, torch.Tensor]
Written = tuple[Tensors, torch.Tensor]  # a weight's tensors by suffix, and the weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """How a weight [rows, columns] is written, and what config.json says of it."""

    write: Callable[[torch.Tensor], Written]
    config: Mapping[str, Any]
    extra: Tensors = field(default_factory=dict)  # beside every weight: what is said of activations
    names: str = QUANTIZED


def write_quantized(folder: Path, scheme: Scheme, model_type: str = "llama", **options: Any) -> PreTrainedModel:
    """Write a random model's checkpoint in a scheme; return the library's model with the weights that it stands for."""
    make_checkpoint(folder, model_type, **options)
    shutil.copytree(folder, folder / "plain")
    save_file(quantize(folder, scheme), folder / "plain" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", attn_implementation="eager", dtype=torch.float32)
    return model.eval().requires_grad_(False)


def quantize(folder: Path, scheme: Scheme) -> Tensors:
    """Write a plain checkpoint anew in a scheme; return the tensors that it now stands for, by their plain names."""
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        plain[name] = weight
        if re.search(scheme.names, name):
            parts, stands_for = scheme.write(tensors.pop(name).float())
            plain[name], base = stands_for.contiguous(), name.removesuffix(".weight")
            tensors |= {base + suffix: part.clone().contiguous() for suffix, part in (parts | scheme.extra).items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(scheme.config)}))
    return plain


def blocks_of(size: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, size)) for start in range(0, size, block)]


# --- FP8 ---


def fp8(weight: torch.Tensor, rows: int, columns: int, scale: str) -> Written:
    """Scales of blocks of rows and columns, 0: of all."""
    size = weight.shape
    tall, wide = blocks_of(size[0], rows or size[0]), blocks_of(size[1], columns or size[1])
    codes, plain = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(len(tall), len(wide))
    for i, down in enumerate(tall):
        for j, across in enumerate(wide):
            block = weight[down, across]
            scales[i, j] = block.abs().max() / 448
            codes[down, across] = (block / scales[i, j]).to(torch.float8_e4m3fn)
            plain[down, across] = codes[down, across].float() * scales[i, j]
    return {".weight": codes, scale: scales if rows or columns else scales.reshape(())}, plain


STATIC = {".input_scale": torch.tensor(0.5)}
COMPRESSED = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    """What llm-compressor writes."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {**COMPRESSED, "format": kind, "config_groups": {"group_0": group}}


SCHEMES: dict[str, Scheme] = {
    "fp8-blocks": Scheme(
        write=lambda weight: fp8(weight, 16, 32, ".weight_scale_inv"),
        config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]},
    ),
    "fp8-static": Scheme(  # Mistral's
        write=lambda weight: fp8(weight, 0, 0, ".weight_scale_inv"),
        config={"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        extra={".activation_scale": torch.tensor(0.5)},
    ),
    "fp8-tensors": Scheme(  # AutoFP8's
        write=lambda weight: fp8(weight, 0, 0, ".weight_scale"),
        config={"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        extra=STATIC,
    ),
    "fbgemm": Scheme(
        write=lambda weight: fp8(weight, 1, 0, ".weight_scale"),
        config={"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    ),
    "compressed-fp8-channels": Scheme(
        write=lambda weight: fp8(weight, 1, 0, ".weight_scale"),
        config=compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "compressed-fp8-tensors": Scheme(
        write=lambda weight: fp8(weight, 0, 0, ".weight_scale"),
        config=compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        extra=STATIC,
    ),
    "compressed-fp8-blocks": Scheme(
        write=lambda weight: fp8(weight, 16, 32, ".weight_scale"),
        config=compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    ),
}


# --- integers ---


def rounded(weight: torch.Tensor, bits: int, group: int, *, is_symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes from 0 on [rows, columns], zero points and scales [rows, groups], and the weight they stand for."""
    top, (rows, columns) = (1 << bits) - 1, weight.shape
    codes, plain = torch.empty(rows, columns, dtype=torch.int64), torch.empty_like(weight)
    parts = blocks_of(columns, group)
    zeros, scales = torch.empty(rows, len(parts), dtype=torch.int64), torch.empty(rows, len(parts))
    for index, part in enumerate(parts):
        low, high = weight[:, part].amin(1), weight[:, part].amax(1)
        if is_symmetric:
            scale, zero = torch.maximum(-low, high) / (top / 2), torch.full((rows,), (top + 1) // 2)
        else:
            scale = (high - low) / top
            zero = (-low / scale).round().clamp(1, top)
        zeros[:, index], scales[:, index] = zero.long(), scale
        codes[:, part] = ((weight[:, part] / scale[:, None]).round() + zero[:, None]).clamp(0, top).long()
        plain[:, part] = (codes[:, part] - zeros[:, index, None]) * scale[:, None]
    return codes, zeros, scales, plain


def packed(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack each row's numbers into words; `order`: which of a word's numbers comes first, second, from its low end."""
    each = 32 // bits
    places = order or tuple(range(each))
    words = torch.zeros(numbers.shape[0], -(-numbers.shape[1] // each), dtype=torch.int64)
    for word in range(words.shape[1]):
        for place, index in enumerate(places):
            column = word * each + index
            if column < numbers.shape[1]:
                words[:, word] |= numbers[:, column] << (place * bits)
    return words.to(torch.int32)  # the highest bit is a sign


def gptq(weight: torch.Tensor, *, bits: int = 4, group: int = 32, offset: int = 1, shuffled: bool = False) -> Written:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3)) if shuffled else None
    ordered = weight if order is None else weight[:, order]
    codes, zeros, scales, plain = rounded(ordered, bits, group, is_symmetric=False)
    groups = torch.arange(weight.shape[1]) // group
    if order is not None:
        back = order.argsort()
        codes, plain, groups = codes[:, back], plain[:, back], groups[back]
    tensors = {
        ".qweight": packed(codes, bits).T,
        ".qzeros": packed((zeros - offset).T, bits),
        ".scales": scales.T,
        ".g_idx": groups.to(torch.int32),
    }
    return tensors, plain


def awq(weight: torch.Tensor) -> Written:
    codes, zeros, scales, plain = rounded(weight, 4, 32, is_symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's `order_map`
    tensors = {".qweight": packed(codes.T, 4, order), ".qzeros": packed(zeros.T, 4, order), ".scales": scales.T}
    return tensors, plain


def pack_quantized(weight: torch.Tensor, bits: int = 4, group: int = 32, *, is_symmetric: bool = True) -> Written:
    codes, zeros, scales, plain = rounded(weight, bits, group, is_symmetric=is_symmetric)
    tensors = {
        ".weight_packed": packed(codes, bits),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not is_symmetric:
        tensors[".weight_zero_point"] = packed(zeros.T, bits).T
    return tensors, plain


def int8(weight: torch.Tensor, *, is_symmetric: bool = True) -> Written:
    codes, zeros, scales, plain = rounded(weight, 8, weight.shape[1], is_symmetric=is_symmetric)
    tensors = {".weight": (codes - 128).to(torch.int8), ".weight_scale": scales}
    if not is_symmetric:
        tensors[".weight_zero_point"] = (zeros - 128).to(torch.int8)
    return tensors, plain


# --- FP4 ---

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def fp4_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Four bits of each number: its sign, and which of `FP4` is nearest."""
    nearest = (numbers.abs()[..., None] - FP4).abs().argmin(-1)
    return nearest + 8 * (numbers < 0)


def fp4(weight: torch.Tensor, group: int, scale_of: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Bytes [rows, columns / 2], scales as `scale_of` rounds them [rows, groups], and the weight they stand for."""
    grouped = weight.unflatten(1, (-1, group))
    scales = scale_of(grouped.abs().amax(-1) / 6)
    codes = fp4_codes(grouped / scales[..., None])
    plain = torch.where(codes < 8, 1.0, -1.0) * FP4[codes % 8] * scales[..., None]
    flat = codes.flatten(1)
    return (flat[:, ::2] | (flat[:, 1::2] << 4)).to(torch.uint8), scales, plain.flatten(1)


def nvfp4(weight: torch.Tensor, names: tuple[str, str, str], *, divides: bool) -> Written:
    largest = (weight.abs().max() / (6 * 448)).float()
    bytes_, scales, plain = fp4(weight, 16, lambda wanted: (wanted / largest).to(torch.float8_e4m3fn).float() * largest)
    whole = torch.stack([1 / largest]) if divides else largest
    return {names[0]: bytes_, names[1]: (scales / largest).to(torch.float8_e4m3fn), names[2]: whole}, plain


def exponents(wanted: torch.Tensor) -> torch.Tensor:
    return wanted.log2().ceil().exp2()


def mxfp4_packed(weight: torch.Tensor) -> Written:
    bytes_, scales, plain = fp4(weight, 32, exponents)
    return {".weight_packed": bytes_, ".weight_scale": (scales.log2() + 127).to(torch.uint8)}, plain


def mxfp4_experts(weight: torch.Tensor) -> Written:
    """gpt-oss: [experts, columns, rows] of the library's module."""
    experts = [fp4(expert.T.contiguous(), 32, exponents) for expert in weight]
    blocks = torch.stack([bytes_.unflatten(1, (-1, 16)) for bytes_, _, _ in experts])
    scales = torch.stack([(scale.log2() + 127).to(torch.uint8) for _, scale, _ in experts])
    return {"_blocks": blocks, "_scales": scales}, torch.stack([plain.T for _, _, plain in experts])


SCHEMES |= {
    "gptq": Scheme(write=gptq, config={"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}),
    "gptq-shuffled": Scheme(
        write=lambda weight: gptq(weight, shuffled=True),
        config={"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    ),
    "gptq-v2-8": Scheme(
        write=lambda weight: gptq(weight, bits=8, offset=0),
        config={"quant_method": "gptq", "bits": 8, "group_size": 32, "checkpoint_format": "gptq_v2"},
    ),
    "awq": Scheme(
        write=awq,
        config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    ),
    "compressed-int4": Scheme(
        write=pack_quantized,
        config=compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
    ),
    "compressed-int4-zeros": Scheme(
        write=lambda weight: pack_quantized(weight, is_symmetric=False),
        config=compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
    ),
    "compressed-int8-packed": Scheme(
        write=lambda weight: pack_quantized(weight, 8),
        config=compressed("pack-quantized", num_bits=8, type="int", strategy="group", group_size=32),
    ),
    "compressed-int4-rows": Scheme(
        write=lambda weight: pack_quantized(weight, group=weight.shape[1]),
        config=compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
    ),
    "compressed-int8-rows": Scheme(
        write=lambda weight: pack_quantized(weight, 8, weight.shape[1]),
        config=compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "compressed-int8": Scheme(
        write=int8,
        config=compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    ),
    "compressed-int8-zeros": Scheme(
        write=lambda weight: int8(weight, is_symmetric=False),
        config=compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
        extra=STATIC,
    ),
    "compressed-nvfp4": Scheme(
        write=lambda weight: nvfp4(weight, (".weight_packed", ".weight_scale", ".weight_global_scale"), divides=True),
        config=compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        extra={".input_global_scale": torch.tensor([3.0])},
    ),
    "compressed-mxfp4": Scheme(
        write=mxfp4_packed,
        config=compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
    "modelopt-nvfp4": Scheme(
        write=lambda weight: nvfp4(weight, (".weight", ".weight_scale", ".weight_scale_2"), divides=False),
        config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        extra=STATIC,
    ),
    "modelopt-fp8": Scheme(
        write=lambda weight: fp8(weight, 0, 0, ".weight_scale"),
        config={"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        extra=STATIC,
    ),
}
MXFP4_EXPERTS = Scheme(  # gpt-oss
    write=mxfp4_experts,
    config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    names=r"experts\.(gate_up|down)_proj$",
)
