"""The start check: compare the engine's logits with the library's, and refuse a model whose logits differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from outrider.verifier_service.messages.batch import ScheduledBatch, slots_of
from outrider.verifier_service.model.architectures import UnsupportedModelError
from outrider.verifier_service.model.empty_model import text_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# tokens of each sequence in each step: a mix of prefill chunks, decode and verification
STEPS = ((19, 4, 11), (1, 3, 1), (5, 1, 5), (1, 1, 1), (1, 0, 0))
LENGTHS = tuple(map(sum, zip(*STEPS, strict=True)))
BLOCK_SIZE = 4
BLOCK_TABLES = ((15, 2, 7, 10, 3, 6, 1), (14, 0, 5), (8, 13, 4, 11, 9))  # scattered
NUM_BLOCKS = 16
TINY_WINDOW = 8
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-1, torch.bfloat16: 3e-1}  # of the logits' own spread
# Quantile of the row differences that must be within the tolerance. Rounding makes single rows of a random text differ
# by several spreads (SmolLM2-135M in bfloat16: 1 row of 54, the one in which the library's bfloat16 is furthest from
# its own float32); an error shows in more than a third of the rows.
SHARE_OF_ROWS = {torch.float32: 1.0, torch.float16: 0.7, torch.bfloat16: 0.7}


def sample_sequences(vocab_size: int) -> list[list[int]]:
    """Return sequences of `LENGTHS` with ids spread over the vocabulary."""
    first = accumulate(LENGTHS, initial=0)
    return [
        [(5 + index * 7919) % vocab_size for index in range(start, start + length)]
        for start, length in zip(first, LENGTHS, strict=False)
    ]


@torch.inference_mode()
def library_logits(model: PreTrainedModel, sequences: Sequence[list[int]]) -> torch.Tensor:
    """Return the logits of the library's own attention, one whole sequence at a time: [sum(LENGTHS), vocab_size]."""
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return torch.cat(
            [
                model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits[0].float()
                for token_ids in sequences
            ]
        )
    finally:
        model.set_attn_implementation(own)


def engine_logits(execute: Callable[[ScheduledBatch], torch.Tensor], sequences: Sequence[list[int]]) -> torch.Tensor:
    """Return the engine's logits of the same sequences, batched in chunks by `STEPS`: [sum(LENGTHS), vocab_size]."""
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for lengths in STEPS:
        spans = {i: range(done[i], done[i] + length) for i, length in enumerate(lengths) if length}
        rows = execute(_step(sequences, spans)).split([len(span) for span in spans.values()])
        for (i, span), own in zip(spans.items(), rows, strict=True):
            parts[i].append(own)
            done[i] = span.stop
    return torch.cat([part for own in parts for part in own])


def _step(sequences: Sequence[list[int]], spans: Mapping[int, range]) -> ScheduledBatch:
    tables = {i: list(BLOCK_TABLES[i][: -(-span.stop // BLOCK_SIZE)]) for i, span in spans.items()}
    return ScheduledBatch(
        token_ids=[sequences[i][position] for i, span in spans.items() for position in span],
        positions=[position for span in spans.values() for position in span],
        slot_mapping=[slot for i, span in spans.items() for slot in slots_of(tables[i], span, BLOCK_SIZE)],
        query_lengths=[len(span) for span in spans.values()],
        context_lengths=[span.stop for span in spans.values()],
        block_tables=list(tables.values()),
        logits_indices=list(range(sum(map(len, spans.values())))),
    )


def require_equal_logits(name: str, expected: torch.Tensor, got: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise `UnsupportedModelError` if the engine's logits differ from the library's: [num_rows, vocab_size] each."""
    difference = row_differences(expected, got).quantile(SHARE_OF_ROWS[dtype]).item()
    if not difference <= TOLERANCE[dtype]:  # also catches NaN
        raise UnsupportedModelError(
            f"{name}: the engine's logits differ from the library's by {difference:.1e} of their spread"
        )


def row_differences(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """Return rms(expected - got) / rms(expected - mean(expected)) of each row: [num_rows]."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean(dim=-1).sqrt()
    return (expected - got).square().mean(dim=-1).sqrt() / spread.clamp_min(1e-12)


def has_long_window(description: PreTrainedConfig) -> bool:
    """Return whether the model's sliding window is longer than all sequences of the check."""
    return (getattr(description, "sliding_window", None) or 0) >= max(LENGTHS)


def make_tiny_model(description: PreTrainedConfig, tensor_parallel_size: int) -> PreTrainedModel:
    """Build a small random model of the same architecture and flags, equal on every rank.

    It tests slicing and windows. The full model cannot: the library's forward would need the weights of all ranks, and
    a window of thousands of tokens would need sequences as long.
    """
    own = description.to_dict()
    own.pop("per_layer_config", None)  # derived from other fields
    tiny = type(description).from_dict({**own, **_tiny_fields(description, tensor_parallel_size)})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return text_model(tiny, attn_implementation="eager", dtype=torch.float32).eval()


def _tiny_layers(description: PreTrainedConfig) -> dict[str, Any]:
    """Return two layers of each kind: the config's lists with an entry for each layer, cut to them."""
    count = description.num_hidden_layers
    fields = description.to_dict().items()
    lists = {name: each for name, each in fields if isinstance(each, list) and len(each) == count}
    kinds = list(zip(*lists.values(), strict=True))
    chosen = [kinds.index(kind) for kind in dict.fromkeys(kinds)] * 2 or [0, 0]
    return {
        "num_hidden_layers": len(chosen),
        "num_kv_shared_layers": len(chosen) // 2 if getattr(description, "num_kv_shared_layers", 0) else 0,
        **{name: [each[index] for index in chosen] for name, each in lists.items()},
    }


def _tiny_fields(description: PreTrainedConfig, size: int) -> dict[str, Any]:
    num_heads, head_dim = 2 * size, 16
    own_kv_heads = getattr(description, "num_key_value_heads", None) or num_heads
    layers = _tiny_layers(description)
    fields: dict[str, Any] = {
        **layers,
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
        "num_attention_heads_per_layer": [num_heads] * layers["num_hidden_layers"],
        "num_sliding_attention_heads": num_heads,
        "num_global_key_value_heads": min(2, getattr(description, "num_global_key_value_heads", None) or 2),
        "vocab_size_per_layer_input": 251,
        "mlp_only_layers": [0] if getattr(description, "mlp_only_layers", None) else [],
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if getattr(description, "sliding_window", None):
        fields["sliding_window"] = TINY_WINDOW
    if getattr(description, "attention_chunk_size", None):
        fields["attention_chunk_size"] = TINY_WINDOW
    has_sections = "mrope_section" in (getattr(description, "rope_parameters", None) or {})
    if hasattr(description, "qk_rope_head_dim") or has_sections:
        del fields["head_dim"]  # latent attention derives it from other sizes; sections share it out
    return {name: value for name, value in fields.items() if _can_be_set(description, name)}


def _can_be_set(description: PreTrainedConfig, name: str) -> bool:
    own = getattr(type(description), name, None)
    return hasattr(description, name) and not (isinstance(own, property) and own.fset is None)


def _tiny_kv_heads(num_kv_heads: int, num_heads: int, size: int) -> int:
    if num_kv_heads == num_heads:
        return 2 * size
    return min(num_kv_heads, size)
