"""Tiny checkpoints in the quantised layouts that people publish, and the weights that they stand for.

Codes are drawn, packed number by number, and dequantised number by number: nothing here is the code under test.
"""

from __future__ import annotations

import json
import re
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


def write_quantized(folder: Path, scheme: Scheme, model_type: str = "llama", **options: Any) -> PreTrainedModel:
    """Write a random model's checkpoint in a scheme; return the library's model with the weights that it stands for."""
    make_checkpoint(folder, model_type, **options)
    tensors, plain = load_file(folder / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if re.search(QUANTIZED, name):
            parts, plain[name] = scheme.write(tensors.pop(name).float())
            base = name.removesuffix(".weight")
            tensors |= {base + suffix: part.clone().contiguous() for suffix, part in (parts | scheme.extra).items()}
        else:
            plain[name] = weight
    reference = library_model(folder, plain)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(scheme.config)}))
    return reference


def library_model(folder: Path, plain: Tensors) -> PreTrainedModel:
    """Load plain weights into the library's model of a folder."""
    save_file({name: weight.contiguous() for name, weight in plain.items()}, folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.eval().requires_grad_(False)


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
