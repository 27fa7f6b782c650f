"""Tiny random checkpoints of many architectures, with an initialisation large enough that mistakes show."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.verifier_service.cpu import kernels
from outrider.verifier_service.cpu.isa import NEEDED, PLAYED_TILES, Isa
from outrider.verifier_service.formats.checkpoint import StateDictSource
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.config import Quantization
from outrider.verifier_service.model.decoder import Decoder
from outrider.verifier_service.model.decoder_spec import read_decoder_spec
from outrider.verifier_service.model.decoder_weights import load_decoder
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.model.weights import WeightReader

VOCAB_SIZE = 256
CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}

# what each architecture's tiny model changes; together: windows, MoE, tied and untied heads, GQA and MHA, biases,
# soft caps, learned positions, parallel residuals
TINY_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 1},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    "gemma3_text": {
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "granite": {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
    "phi3": {},
    "phi": {"num_key_value_heads": 4},
    "gpt_neox": {},
    "starcoder2": {"sliding_window": 8},
    "ministral": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 4, "tie_word_embeddings": True},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "olmo": {},
    "olmo2": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "stablelm": {},
    "cohere": {"tie_word_embeddings": True, "logit_scale": 0.5},
    "smollm3": {},
    "glm4": {"num_key_value_heads": 2},
}


def make_model(
    model_type: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """Build a random model with the library's own attention; biases and norms are random too."""
    config = AutoConfig.for_model(model_type, **{**COMMON, **TINY_ARCHITECTURES.get(model_type, {}), **overrides})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # ones and zeros would hide a missing norm or bias
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.requires_grad_(False)


def make_checkpoint(
    folder: Path, model_type: str = "llama", *, max_shard_size: str = "1GB", **options: Any
) -> PreTrainedModel:
    """Write a random model's checkpoint into `folder` and return the model."""
    model = make_model(model_type, **options)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


@torch.inference_mode()
def full_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """The library's own logits of a whole sequence: [num_tokens, vocab_size]."""
    return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()


def random_sequences(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def scattered_batches(
    sequences: list[list[int]], *, num_blocks: int, block_size: int, seed: int = 2
) -> Iterator[tuple[ScheduledBatch, list[tuple[int, int]]]]:
    """Schedule the sequences in chunks of uneven length over scattered blocks.

    Yields each step's batch and, for each of its rows, which (sequence, position) it is. Steps mix long chunks, short
    chunks and single tokens; some tokens' logits are not asked for.
    """
    generator = random.Random(seed)
    free = generator.sample(range(1, num_blocks), num_blocks - 1)  # block 0 stays unwritten
    tables = [[free.pop() for _ in range(-(-len(sequence) // block_size))] for sequence in sequences]
    computed = [0] * len(sequences)
    while any(done < len(sequence) for done, sequence in zip(computed, sequences, strict=True)):
        fields: dict[str, list[Any]] = {name: [] for name in ("token_ids", "positions", "slot_mapping")}
        fields |= {name: [] for name in ("query_lengths", "context_lengths", "block_tables", "logits_indices")}
        rows: list[tuple[int, int]] = []
        for index, sequence in enumerate(sequences):
            start = computed[index]
            stop = min(start + generator.choice((1, 1, 5, 18)), len(sequence))
            if start == stop:
                continue
            computed[index] = stop
            for position in range(start, stop):
                if position % 4 != 3:
                    fields["logits_indices"].append(len(fields["token_ids"]))
                    rows.append((index, position))
                fields["token_ids"].append(sequence[position])
                fields["positions"].append(position)
                slot = tables[index][position // block_size] * block_size + position % block_size
                fields["slot_mapping"].append(slot)
            fields["query_lengths"].append(stop - start)
            fields["context_lengths"].append(stop)
            fields["block_tables"].append(tables[index][: -(-stop // block_size)])
        yield ScheduledBatch(**fields), rows


def forked_batches(sequences: list[list[int]], num_shared: int, *, block_size: int) -> Iterator[ScheduledBatch]:
    """Compute a prefix that all sequences have, then the rest of each over its blocks, the last of them copied.

    The first step has no rows, the second those of every position from `num_shared` on, sequence after sequence.
    """
    assert num_shared % block_size, "a whole block would need no copy"
    last = num_shared // block_size
    width = -(-len(sequences[0]) // block_size)
    first = list(range(1, width + 1))
    tables = [first] + [first[:last] + list(range(width * n, width * (n + 1))) for n in range(2, len(sequences) + 1)]
    yield _chunks([sequences[0][:num_shared]], [first], 0, [], [], block_size)
    targets = [table[last] for table in tables[1:]]
    yield _chunks(sequences, tables, num_shared, [first[last]] * len(targets), targets, block_size)


def _chunks(
    sequences: list[list[int]],
    tables: list[list[int]],
    start: int,
    copy_sources: list[int],
    copy_targets: list[int],
    block_size: int,
) -> ScheduledBatch:
    """Pack every sequence from `start` on; rows for all tokens but those of a prefix."""
    places = [(n, p) for n, sequence in enumerate(sequences) for p in range(start, len(sequence))]
    return ScheduledBatch(
        token_ids=[sequences[n][p] for n, p in places],
        positions=[p for _, p in places],
        slot_mapping=[tables[n][p // block_size] * block_size + p % block_size for n, p in places],
        query_lengths=[len(sequence) - start for sequence in sequences],
        context_lengths=[len(sequence) for sequence in sequences],
        block_tables=[table[: -(-len(each) // block_size)] for table, each in zip(tables, sequences, strict=True)],
        logits_indices=list(range(len(places))) if start else [],
        copy_sources=copy_sources,
        copy_targets=copy_targets,
    )


def relative_difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return rms(expected - got) / rms(expected - mean(expected)), over all rows."""
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    return ((expected - got).square().mean().sqrt() / spread.clamp_min(1e-12)).item()


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Have what is loaded within find no kernels, as on an accelerator; what was loaded before keeps its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.VARIABLE, "0")
        _forget_kernels()
        yield
    _forget_kernels()


def _forget_kernels() -> None:
    kernels.load_kernels.cache_clear()
    kernels._library.cache_clear()


def decoder_of(
    model: PreTrainedModel,
    dtype: torch.dtype = torch.float32,
    quantization: Quantization | None = None,
    device: torch.device = CPU,
) -> Decoder:
    """Load a model's weights into our decoder; the model itself is left as it is."""
    spec = read_decoder_spec(model.config)
    assert spec is not None
    reader, group = WeightReader(StateDictSource(model.state_dict())), TensorParallelGroup.single()
    return load_decoder(spec, reader, group, dtype=dtype, device=device, quantization=quantization)


def played_tiles(dtype: torch.dtype) -> kernels.Kernels:
    """Our kernels with the sums of AMX and none of its instructions; without AVX-512 the test is skipped by name."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")
    if not NEEDED[Isa.AVX512] <= set(kernels._cpu_info().split()):
        pytest.skip("needs a processor with AVX-512")
    return kernels.Kernels(kernels._compile_once(compiler, (PLAYED_TILES,)), dtype)
