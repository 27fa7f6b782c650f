"""What a config says becomes a spec; a spec that says something else is caught by the check at start."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from outrider.verifier_service.formats.checkpoint import StateDictSource, WeightError
from outrider.verifier_service.model import runner as runner_module
from outrider.verifier_service.model.architectures import UnsupportedModelError
from outrider.verifier_service.model.decoder_spec import (
    FAMILIES,
    DecoderSpec,
    LayerSpec,
    NormNames,
    read_decoder_spec,
)
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import TINY_ARCHITECTURES, make_model


def spec_of(name: str, **overrides: Any) -> DecoderSpec:
    spec = read_decoder_spec(make_model(name, **overrides).config)
    assert spec is not None
    return spec


def test_every_family_has_a_tiny_model() -> None:
    assert set(FAMILIES) <= set(TINY_ARCHITECTURES)


def test_what_a_config_says() -> None:
    spec = spec_of("llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.hidden_size, spec.inner_size) == (4, 2, 16, 64, 96)
    assert (spec.has_qkv_bias, spec.has_output_bias, spec.has_mlp_bias, spec.is_tied) == (True, True, True, True)
    assert spec.attention_scale == 0.25
    assert spec.layers == (LayerSpec(),) * 2
    theta = make_model("llama").config.rope_parameters["rope_theta"]
    assert spec.rotaries["all"].frequencies == pytest.approx([theta ** (-i / 8) for i in range(8)])


def test_what_families_do_in_their_own_ways() -> None:
    assert spec_of("glm4").rotaries["all"].is_interleaved
    assert len(spec_of("glm4").rotaries["all"].frequencies) == 4  # half of the head turns
    assert [layer.window for layer in spec_of("gemma3_text").layers] == [8, None]
    assert [layer.rotary for layer in spec_of("gemma3_text").layers] == ["sliding_attention", "full_attention"]
    assert [layer.rotary for layer in spec_of("smollm3", num_hidden_layers=4).layers] == ["all", "all", "all", None]
    assert spec_of("mistral").layers[1].window == 8
    assert spec_of("granite").logits_scale == pytest.approx(1 / 3)
    experts = spec_of("qwen2_moe").layers[0].experts
    assert experts is not None
    assert (experts.num_experts, experts.inner_size, experts.shared_inner_size) == (4, 32, 32)
    sparse = spec_of("qwen3_moe", mlp_only_layers=[0]).layers
    assert (sparse[0].experts, sparse[1].experts is None) == (None, False)


SCALED_ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", SCALED_ROPE)
def test_scaled_rotary_embeddings_are_the_librarys(kind: str) -> None:
    model = make_model("llama", rope_parameters={"rope_theta": 10_000.0, **SCALED_ROPE[kind]})
    load(model.config, model.state_dict())
    assert read_decoder_spec(model.config) != spec_of("llama")


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("olmoe", {"clip_qkv": 4.0}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("llama", {"hidden_act": "relu"}),
        ("gpt2", {}),
    ],
)
def test_what_is_not_described_is_left_to_the_library(name: str, overrides: dict[str, Any]) -> None:
    config = make_model(name).config
    for field, value in overrides.items():
        setattr(config, field, value)
    assert read_decoder_spec(config) is None


def load(config: PreTrainedConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Load a model with the check at start."""
    source, cpu = StateDictSource(tensors), torch.device("cpu")
    runner_module.load_model(config, source, TensorParallelGroup.single(), torch.float32, cpu, check=True)


def with_layers(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    return dataclasses.replace(spec, layers=tuple(dataclasses.replace(layer, **changes) for layer in spec.layers))


def with_rotary(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    rotaries = {name: dataclasses.replace(rotary, **changes) for name, rotary in spec.rotaries.items()}
    return dataclasses.replace(spec, rotaries=rotaries)


def with_experts(spec: DecoderSpec, **changes: Any) -> DecoderSpec:
    experts = spec.layers[0].experts
    assert experts is not None
    return with_layers(spec, experts=dataclasses.replace(experts, **changes))


replaced = dataclasses.replace
SWAPPED = NormNames(before_attention="post_attention_layernorm", before_mlp="input_layernorm")
MUTATIONS = {
    "a norm's eps": ("llama", lambda spec: replaced(spec, norm_eps=1.0)),
    "norms change places": ("llama", lambda spec: replaced(spec, norm_names=SWAPPED)),
    "an offset of norms": ("llama", lambda spec: replaced(spec, norm_offset=1.0)),
    "no offset of norms": ("gemma", lambda spec: replaced(spec, norm_offset=0.0)),
    "no norm of queries and keys": ("qwen3", lambda spec: replaced(spec, query_key_norm=None)),
    "another activation": ("llama", lambda spec: replaced(spec, activation="gelu")),
    "another kind of gelu": ("gemma", lambda spec: replaced(spec, activation="silu")),
    "attention's scale": ("granite", lambda spec: replaced(spec, attention_scale=0.25)),
    "no soft cap of attention": ("gemma2", lambda spec: replaced(spec, attention_softcap=2.0)),
    "no soft cap of logits": ("gemma2", lambda spec: replaced(spec, logits_softcap=None)),
    "the logits' scale": ("granite", lambda spec: replaced(spec, logits_scale=1.0)),
    "the embedding's scale": ("granite", lambda spec: replaced(spec, embedding_scale=1.0)),
    "the residual's scale": ("granite", lambda spec: replaced(spec, residual_scale=0.5)),
    "no window": ("mistral", lambda spec: with_layers(spec, window=None)),
    "a window off by one": ("mistral", lambda spec: with_layers(spec, window=9)),
    "no positions": ("llama", lambda spec: with_layers(spec, rotary=None)),
    "neighbours turn": ("llama", lambda spec: with_rotary(spec, is_interleaved=True)),
    "halves turn": ("glm4", lambda spec: with_rotary(spec, is_interleaved=False)),
    "other frequencies": ("llama", lambda spec: with_rotary(spec, frequencies=(1.0,) * 8)),
    "fewer frequencies": ("llama", lambda spec: with_rotary(spec, frequencies=spec.rotaries["all"].frequencies[:4])),
    "the turn's scale": ("llama", lambda spec: with_rotary(spec, scale=1.1)),
    "fewer active experts": ("mixtral", lambda spec: with_experts(spec, num_active=1)),
    "experts' weights do not sum to one": ("mixtral", lambda spec: with_experts(spec, normalises=False)),
    "no shared expert": ("qwen2_moe", lambda spec: with_experts(spec, shared_inner_size=0)),
    "no bias of queries": ("qwen2", lambda spec: replaced(spec, has_qkv_bias=False)),
    "a head of its own": ("qwen2", lambda spec: replaced(spec, is_tied=False)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught_by_the_check_at_start(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutate = MUTATIONS[mutation]
    model = make_model(name)
    load(model.config, model.state_dict())  # as it is, it passes
    if mutation == "a head of its own":  # equal where the checkpoint holds it twice
        tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    else:
        tensors = model.state_dict()
    monkeypatch.setattr(runner_module, "read_decoder_spec", lambda config: mutate(read_decoder_spec(config)))
    with pytest.raises((UnsupportedModelError, WeightError)):
        load(model.config, tensors)
