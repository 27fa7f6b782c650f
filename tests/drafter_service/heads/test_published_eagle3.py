"""EAGLE-3 heads in the layouts that are published for gpt-oss and Qwen3's mixtures: read, equal by hand, drafting."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from exactness.drafter_cells import Bench
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service.heads.eagle3 import Eagle3Head
from outrider.verifier_service.formats.checkpoint import Checkpoint
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from tiny.hub.families import make_family_checkpoint
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


def by_hand(own: Tensors, embedding: torch.Tensor, token_ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Return the logits of pairs (states, token), [num_pairs, vocab_size], as the paper has them."""
    count = len(token_ids)
    hidden = states @ own["fc.weight"].T
    normed = [F.rms_norm(embedding[token_ids], (SIZE,), own["layer.input_layernorm.weight"], EPS)]
    normed.append(F.rms_norm(hidden, (SIZE,), own["layer.hidden_norm.weight"], EPS))
    rows = torch.cat(normed, dim=1)
    heads = [rows @ own[f"layer.self_attn.{name}_proj.weight"].T for name in "qkv"]
    query, key, value = (each.view(count, -1, HEAD_DIM).transpose(0, 1) for each in heads)
    query, key = turned(query), turned(key)
    scores = query @ key.repeat_interleave(2, dim=0).transpose(1, 2) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
    read = scores.softmax(dim=2) @ value.repeat_interleave(2, dim=0)
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


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_drafts_change_no_token(folders: tuple[Path, Path], bench: Bench) -> None:
    target, head = folders
    options = {"model": str(target), "seed": 0, "device": "cpu", "max_model_len": 160}
    speculative = {"method": "eagle3", "model": str(head), "location": "verifier", "num_speculative_tokens": 3}
    requests = [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
            plan=SpeculationPlan(draft_length=3),
        )
        for index, prompt in enumerate(PROMPTS)
    ]
    plain = bench.run(ServiceConfig(**options, num_drafters=0), requests)
    drafted = bench.run(ServiceConfig(**options, speculative_config=speculative), requests)
    assert drafted.token_ids == plain.token_ids
    assert drafted.num_draft_tokens > 0
