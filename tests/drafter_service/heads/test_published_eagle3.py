"""EAGLE-3 heads in the layouts that are published for gpt-oss and Qwen3's mixtures: read, equal by hand, drafting."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from exactness.drafter_cells import Bench
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.drafter_service.heads.head_layer import load_heads
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.formats.checkpoint import Checkpoint
from outrider.verifier_service.model.config import ModelConfig
from tiny.hub.families import make_family_checkpoint
from tiny.hub.prediction_layers import pairs
from tiny.models import VOCAB_SIZE, make_checkpoint, random_sequences, relative_difference

SIZE, NUM_HEADS, HEAD_DIM, INNER, NUM_DRAFTED, NUM_LAYERS, EPS, BASE = 64, 4, 16, 48, 120, 6, 1e-5, 10_000.0
TAPS = (2, 3, 3)  # the authors' of six layers: an early, the middle and a late one
PROMPTS = random_sequences((5, 21))
Tensors = Mapping[str, torch.Tensor]
LAYER = {
    "model_type": "llama",
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": EPS,
    "rope_theta": BASE,
    "max_position_embeddings": 256,
}
# NVIDIA's for gpt-oss and Qwen3-235B-A22B: no taps named, and flags of their trainer
NVIDIA = {
    "eagle_aux_hidden_state_layer_ids": [],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
}
SPECFORGE = {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True}
ORIGINAL = {**LAYER, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": NUM_DRAFTED}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": NUM_DRAFTED,
    "eagle_aux_hidden_state_layer_ids": list(TAPS),
    "norm_before_residual": False,
    "target_hidden_size": None,
}
# what is published: (config, the layer's prefix, that of others, the target)
LAYOUTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "nvidia, gpt-oss": ({**ORIGINAL, "eagle_config": NVIDIA}, "midlayer.", "", "gpt-oss"),
    "specforge, gpt-oss": ({**ORIGINAL, "eagle_config": SPECFORGE}, "midlayer.", "", "gpt-oss"),
    "vllm, qwen3_moe": ({**ORIGINAL, "eagle_config": SPECFORGE}, "model.layers.0.", "model.", "qwen3_moe"),
    "speculators, qwen3_moe": (SPECULATORS, "layers.0.", "", "qwen3_moe"),
}


def make_tensors() -> dict[str, torch.Tensor]:
    """Return a head's tensors by the names of its layer ("layer.") and of the rest."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> torch.Tensor:
        is_norm = len(shape) == 1
        return torch.randn(shape, generator=generator) * (0.2 if is_norm else shape[-1] ** -0.5) + float(is_norm)

    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:NUM_DRAFTED].sort().values
    return {
        "fc.weight": draw(SIZE, 3 * SIZE),
        "norm.weight": draw(SIZE),
        "lm_head.weight": draw(NUM_DRAFTED, SIZE),
        "d2t": ids - torch.arange(NUM_DRAFTED),
        "t2d": torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True),
        "layer.hidden_norm.weight": draw(SIZE),
        "layer.input_layernorm.weight": draw(SIZE),
        "layer.post_attention_layernorm.weight": draw(SIZE),
        "layer.self_attn.q_proj.weight": draw(NUM_HEADS * HEAD_DIM, 2 * SIZE),
        "layer.self_attn.k_proj.weight": draw(2 * HEAD_DIM, 2 * SIZE),
        "layer.self_attn.v_proj.weight": draw(2 * HEAD_DIM, 2 * SIZE),
        "layer.self_attn.o_proj.weight": draw(SIZE, NUM_HEADS * HEAD_DIM),
        "layer.mlp.gate_proj.weight": draw(INNER, SIZE),
        "layer.mlp.up_proj.weight": draw(INNER, SIZE),
        "layer.mlp.down_proj.weight": draw(SIZE, INNER),
    }


def grouped_heads(own: Tensors, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values of all heads, [num_heads, num_tokens, head_dim] each."""
    heads = [rows @ own[f"layer.self_attn.{name}_proj.weight"].T for name in "qkv"]
    query, key, value = (each.view(len(rows), -1, HEAD_DIM).transpose(0, 1) for each in heads)
    return turned(query), turned(key).repeat_interleave(2, dim=0), value.repeat_interleave(2, dim=0)


def by_hand(
    own: Tensors,
    embedding: torch.Tensor,
    token_ids: torch.Tensor,
    states: torch.Tensor,
    heads_of: Callable[[Tensors, torch.Tensor], tuple[torch.Tensor, ...]] = grouped_heads,
) -> torch.Tensor:
    """Return the logits of pairs (states, token), [num_pairs, vocab_size], as the paper has them."""
    count = len(token_ids)
    hidden = states @ own["fc.weight"].T
    normed = [F.rms_norm(embedding[token_ids], (SIZE,), own["layer.input_layernorm.weight"], EPS)]
    normed.append(F.rms_norm(hidden, (SIZE,), own["layer.hidden_norm.weight"], EPS))
    rows = torch.cat(normed, dim=1)
    query, key, value = heads_of(own, rows)
    scores = query @ key.transpose(1, 2) / query.shape[2] ** 0.5
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
    read = scores.softmax(dim=2) @ value
    hidden = hidden + read.transpose(0, 1).flatten(1) @ own["layer.self_attn.o_proj.weight"].T
    rows = F.rms_norm(hidden, (SIZE,), own["layer.post_attention_layernorm.weight"], EPS)
    gate, up = rows @ own["layer.mlp.gate_proj.weight"].T, rows @ own["layer.mlp.up_proj.weight"].T
    hidden = hidden + (F.silu(gate) * up) @ own["layer.mlp.down_proj.weight"].T
    logits = F.rms_norm(hidden, (SIZE,), own["norm.weight"], EPS) @ own["lm_head.weight"].T
    spread = logits.new_full((count, VOCAB_SIZE), float("-inf"))
    spread[:, own["d2t"] + torch.arange(NUM_DRAFTED)] = logits
    return spread


def turned(heads: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    angles = torch.arange(heads.shape[1])[:, None] * BASE ** (-torch.arange(half) / half)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a head for it."""
    config, layer, rest, name = LAYOUTS[request.param]
    target, head = (tmp_path_factory.mktemp(part) for part in ("target", "head"))
    if name == "gpt-oss":
        types = ["sliding_attention", "full_attention"] * 3
        make_family_checkpoint(target, name, num_hidden_layers=NUM_LAYERS, layer_types=types)
    else:
        make_checkpoint(target, name, num_hidden_layers=NUM_LAYERS)
    (head / "config.json").write_text(json.dumps(config))
    tensors = {
        layer + key.removeprefix("layer.") if key.startswith("layer.") else key if key in BARE else rest + key: tensor
        for key, tensor in make_tensors().items()
    }
    save_file(tensors, head / "model.safetensors")
    return target, head


BARE = ("lm_head.weight", "d2t", "t2d")


@torch.no_grad()
def test_its_logits_are_those_computed_by_hand(folders: tuple[Path, Path]) -> None:
    target, folder = folders
    with Checkpoint(target) as source:
        head = Eagle3Head.from_folder(folder, target=source, num_target_layers=NUM_LAYERS)
        embedding = source.read("model.embed_tokens.weight")
    assert head.taps == TAPS
    token_ids = torch.tensor(random_sequences((15,))[0])
    states = torch.randn(15, 3 * SIZE, generator=torch.Generator().manual_seed(1))
    output, _ = head(token_ids[None], head.combine(states)[None], torch.arange(15)[None])
    got, wanted = head.in_target_ids(head.logits(output))[0], by_hand(make_tensors(), embedding, token_ids, states)
    assert torch.equal(got.isinf(), wanted.isinf())
    assert relative_difference(wanted[~wanted.isinf()], got[~wanted.isinf()]) < 1e-5


KIMI = {
    **{name: value for name, value in ORIGINAL.items() if name not in ("head_dim", "rope_theta")},
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "num_key_value_heads": NUM_HEADS,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": BASE},
    "eagle_config": SPECFORGE,
}


def latent_tensors() -> dict[str, torch.Tensor]:
    """Return a head's tensors with latent attention in place of grouped queries."""
    generator = torch.Generator().manual_seed(9)
    shapes = {
        "q_a_proj": (24, 2 * SIZE),
        "q_b_proj": (NUM_HEADS * 24, 24),
        "kv_a_proj_with_mqa": (16 + 8, 2 * SIZE),
        "kv_b_proj": (NUM_HEADS * 32, 16),
        "o_proj": (SIZE, NUM_HEADS * 16),
    }
    drawn = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
    drawn |= {
        "q_a_layernorm": torch.rand(24, generator=generator),
        "kv_a_layernorm": torch.rand(16, generator=generator),
    }
    plain = {name: tensor for name, tensor in make_tensors().items() if ".self_attn." not in name}
    return plain | {f"layer.self_attn.{name}.weight": tensor for name, tensor in drawn.items()}


def latent_heads(own: Tensors, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of all heads, [num_heads, num_tokens, ...] each, by DeepSeek-V2's section 2.1."""
    weight = {name.removeprefix("layer.self_attn.").removesuffix(".weight"): each for name, each in own.items()}
    query = F.rms_norm(rows @ weight["q_a_proj"].T, (24,), weight["q_a_layernorm"], 1e-6) @ weight["q_b_proj"].T
    query = query.view(len(rows), NUM_HEADS, 24).transpose(0, 1)
    latent, rotated = (rows @ weight["kv_a_proj_with_mqa"].T).split([16, 8], dim=1)
    both = F.rms_norm(latent, (16,), weight["kv_a_layernorm"], 1e-6) @ weight["kv_b_proj"].T
    key, value = both.view(len(rows), NUM_HEADS, 32).transpose(0, 1).split([16, 16], dim=2)
    rotated = neighbours_turned(rotated[None]).expand(NUM_HEADS, -1, -1)
    query = torch.cat([query[..., :16], neighbours_turned(query[..., 16:])], dim=2)
    return query, torch.cat([key, rotated], dim=2), value


def neighbours_turned(heads: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(heads.shape[1])[:, None] * BASE ** (-torch.arange(4) / 4)
    first, second = heads[..., ::2], heads[..., 1::2]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=2
    )


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Kimi's target and a head for it."""
    target, head = (tmp_path_factory.mktemp(part) for part in ("target", "head"))
    make_family_checkpoint(target, "kimi-k2.5", num_hidden_layers=NUM_LAYERS)
    (head / "config.json").write_text(json.dumps(KIMI))
    tensors = {name.replace("layer.", "midlayer."): tensor for name, tensor in latent_tensors().items()}
    save_file(tensors, head / "model.safetensors")
    return target, head


@torch.no_grad()
def test_so_are_those_of_kimis_latent_attention(kimi: tuple[Path, Path]) -> None:
    target, folder = kimi
    config = ModelConfig(path=str(folder), device="cpu", dtype="float32", num_kv_blocks=16)
    (head,) = load_heads(Eagle3Head, [folder], config, target=target, num_target_layers=NUM_LAYERS)
    runner = HeadRunner.sized_by(SwitchedHeads([head]), config)
    assert runner.pool.keys[0].shape[1:] == (1, 24)  # latents, not heads
    (token_ids,) = random_sequences((16,))
    states = torch.randn(15, 3 * SIZE, generator=torch.Generator().manual_seed(1))
    parts = [
        runner.execute(pairs(token_ids, *span), runner.combine(states[slice(*span)])) for span in ((0, 9), (9, 15))
    ]
    got, tokens = torch.cat([part.logits for part in parts]), torch.tensor(token_ids[1:])
    wanted = by_hand(latent_tensors(), head.embed_tokens.weight, tokens, states, latent_heads)
    assert relative_difference(wanted[~wanted.isinf()], got[~wanted.isinf()]) < 1e-5


def test_kimis_drafts_change_no_token(kimi: tuple[Path, Path], bench: Bench) -> None:
    test_drafts_change_no_token(kimi, bench)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_drafts_change_no_token(folders: tuple[Path, Path], bench: Bench) -> None:
    target, head = folders
    options = {"model": str(target), "seed": 0, "device": "cpu", "max_model_len": 160}
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    bench.require_same_tokens(options, speculative, PROMPTS)
