"""Resolve the "auto" and None fields of a `ModelConfig`: device, dtype, maximum length, size of the KV pool."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedConfig

from outrider.verifier_service.cpu.isa import Isa
from outrider.verifier_service.cpu.kernels import wanted_isa
from outrider.verifier_service.model.attention import LayerShape
from outrider.verifier_service.model.config import ModelConfig

logger = logging.getLogger(__name__)

CPU_CACHE_LIMIT_BYTES = 1 << 30
CPU_CACHE_SHARE = 0.1  # of the physical memory
FP8_CAPABILITY = (8, 9)  # Ada and Hopper
CUDA_CACHE_SHARE = 0.8  # of the free memory after the weights are loaded


def resolve_device(name: str) -> torch.device:
    """Resolve `ModelConfig.device`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, description: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """Resolve `ModelConfig.dtype`; "auto" is the checkpoint's own.

    On a CPU, "auto" is bfloat16 for a 16-bit checkpoint if the processor has instructions for it, else float32.
    """
    if name != "auto":
        return getattr(torch, name)
    own = description.dtype
    if not isinstance(own, torch.dtype):
        return torch.float32
    if device.type == "cuda":
        return own
    return torch.bfloat16 if own.itemsize == 2 and multiplies_bfloat16() else torch.float32


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Resolve `ModelConfig.kv_cache_dtype`; "auto" is the model's. Raises `ValueError` where a device lacks it."""
    if name == "auto":
        return dtype
    if not has_fp8(device):
        raise ValueError("kv_cache_dtype: fp8 needs a device that reads FP8, from Ada and Hopper on")
    return torch.float8_e4m3fn


def has_fp8(device: torch.device) -> bool:
    """Return whether a device computes with FP8 numbers; CPUs do."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def with_dtype(config: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    """Return the config of a model that is loaded as `dtype`, whatever its checkpoint's."""
    return replace(config, dtype=str(dtype).removeprefix("torch."))


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions for bfloat16 products (AVX512-BF16 or AMX), and may use them."""
    found = torch.cpu.get_capabilities()
    return bool(found.get("avx512_bf16") or found.get("amx_bf16")) and wanted_isa() not in (Isa.AVX2, Isa.BASELINE)


def own_limit(description: PreTrainedConfig) -> int:
    """Return how many positions a model knows: with YaRN its factor times those before it, as in vLLM.

    `max_position_embeddings` may be either: Qwen's have those before, DeepSeek's those after.
    """
    limits = (int(rope["factor"] * rope["original_max_position_embeddings"]) for rope in _yarns(description))
    return max([description.max_position_embeddings, *limits])


def _yarns(description: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of YaRN: of all layers, or by their types."""
    given = getattr(description, "rope_parameters", None) or {}
    ropes = [given, *(nested for nested in given.values() if isinstance(nested, dict))]
    return [rope for rope in ropes if rope.get("rope_type") == "yarn" and rope.get("factor")]


def resolve_max_model_len(config: ModelConfig, description: PreTrainedConfig) -> int:
    """Return the maximum sequence length, at most the model's own limit; raises `ValueError` naming the field."""
    own = own_limit(description)
    if config.max_model_len is None or (config.may_be_shorter and config.max_model_len > own):
        return own
    if config.max_model_len > own:
        raise ValueError(f"max_model_len must be at most the model's own limit of {own}")
    return config.max_model_len


def limit_to_pool(config: ModelConfig, max_model_len: int, num_slots: int) -> int:
    """Bound the maximum length by the KV pool's slots; raises `ValueError` if the config asks for more."""
    if max_model_len <= num_slots:
        return max_model_len
    if config.max_model_len is not None and not config.may_be_shorter:
        raise ValueError(f"max_model_len must be at most {num_slots}, the tokens that the KV cache holds")
    logger.warning("the KV cache holds %d tokens of the model's %d: sequences end there", num_slots, max_model_len)
    return num_slots


def resolve_num_blocks(
    config: ModelConfig, shapes: dict[int, LayerShape], dtype: torch.dtype, device: torch.device
) -> int:
    """Return the number of KV blocks that fit; raises `ValueError` if none does."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    block_bytes = config.block_size * dtype.itemsize * sum(shape.num_elements for shape in shapes.values())
    budget_bytes = config.kv_cache_memory_bytes or free_cache_bytes(device)
    if budget_bytes < block_bytes:
        raise ValueError(f"kv_cache_memory_bytes must be at least {block_bytes}, one block; there are {budget_bytes}")
    return budget_bytes // block_bytes


def free_cache_bytes(device: torch.device) -> int:
    """Return the default size of the KV pool: a small share of a CPU's memory, most of a CUDA device's free memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_CACHE_SHARE)
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(CPU_CACHE_LIMIT_BYTES, int(physical_bytes * CPU_CACHE_SHARE))
