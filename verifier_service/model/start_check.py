"""At start, compare the engine's logits with the library's own: a model that is served wrongly is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.model.architectures import UnsupportedModelError

NUM_TOKENS = 27
CHUNK_LENGTHS = (19, 1, 5, 1, 1)  # a long prefill chunk, decode, verification, decode: they sum to NUM_TOKENS
BLOCK_SIZE = 4
BLOCK_TABLE = (5, 2, 7, 0, 3, 6, 1)  # scattered
NUM_BLOCKS = 8
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}  # of the logits' own spread


def sample_token_ids(vocab_size: int) -> list[int]:
    """Spread `NUM_TOKENS` ids over the vocabulary."""
    return [(5 + index * 7919) % vocab_size for index in range(NUM_TOKENS)]


@torch.inference_mode()
def library_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """Run the library's own attention over the whole sequence: [NUM_TOKENS, vocab_size]."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(own)


def engine_logits(execute: Callable[[ScheduledBatch], torch.Tensor], token_ids: list[int]) -> torch.Tensor:
    """Run the same sequence in chunks through the engine: [NUM_TOKENS, vocab_size]."""
    logits, start = [], 0
    for length in CHUNK_LENGTHS:
        logits.append(execute(_chunk(token_ids, start, start + length)))
        start += length
    return torch.cat(logits)


def _chunk(token_ids: list[int], start: int, stop: int) -> ScheduledBatch:
    positions = list(range(start, stop))
    return ScheduledBatch(
        token_ids=token_ids[start:stop],
        positions=positions,
        slot_mapping=slots_of(BLOCK_TABLE, range(start, stop), BLOCK_SIZE),
        query_lengths=[stop - start],
        context_lengths=[stop],
        block_tables=[list(BLOCK_TABLE[: -(-stop // BLOCK_SIZE)])],
        logits_indices=list(range(stop - start)),
    )


def require_equal_logits(name: str, expected: torch.Tensor, got: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` where the engine's logits are not the library's."""
    difference = relative_difference(expected, got)
    if not difference <= TOLERANCE[dtype]:  # also catches NaN
        raise UnsupportedModelError(
            f"{name}: the engine's logits differ from the library's by {difference:.1e} of their spread"
        )


def relative_difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return rms(expected - got) / rms(expected - mean(expected)), over all rows."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    return ((expected - got).square().mean().sqrt() / spread.clamp_min(1e-12)).item()


def make_tiny_model(description: PreTrainedConfig, tensor_parallel_size: int) -> PreTrainedModel:
    """Build a small random model of the same architecture and flags, the same on every rank.

    A sharded model cannot be compared with the library's own forward, which would need all of the weights; the slicing
    of this one can.
    """
    tiny = type(description).from_dict({**description.to_dict(), **_tiny_fields(description, tensor_parallel_size)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(tiny, attn_implementation="eager", dtype=torch.float32).eval()


def _tiny_fields(description: PreTrainedConfig, size: int) -> dict[str, Any]:
    num_heads, head_dim = 2 * size, 16
    own_kv_heads = getattr(description, "num_key_value_heads", None) or num_heads
    layer_types = list(dict.fromkeys(getattr(description, "layer_types", None) or [])) * 2
    fields: dict[str, Any] = {
        "vocab_size": 251,  # not divisible: the last rank holds fewer rows
        "hidden_size": num_heads * head_dim,
        "head_dim": head_dim,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _tiny_kv_heads(own_kv_heads, description.num_attention_heads, size),
        "intermediate_size": 48 * size,
        "moe_intermediate_size": 16 * size,
        "num_local_experts": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": len(layer_types) or 2,
        "layer_types": layer_types or None,
        "mlp_only_layers": [0] if getattr(description, "mlp_only_layers", None) else [],
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if getattr(description, "sliding_window", None):
        fields["sliding_window"] = 8
    return {name: value for name, value in fields.items() if hasattr(description, name)}


def _tiny_kv_heads(num_kv_heads: int, num_heads: int, size: int) -> int:
    if num_kv_heads == num_heads:
        return 2 * size
    return min(num_kv_heads, size)
