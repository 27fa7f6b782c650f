"""A decoder-only transformer as data: read from the library's config, executed by `decoder.Decoder`.

A `Family` adds what its configs leave out: which norms and biases exist, what a field means. A checkpoint that needs
more (`read_decoder_spec` returns None) runs through the library's code instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


class QueryKeyNorm(StrEnum):
    """What the norm of queries and keys, before their rotation, runs over."""

    HEAD = "head"
    ALL_HEADS = "all_heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """A rotary embedding of a head's first `2 * len(frequencies)` dimensions (Su et al., 2021, arXiv:2104.09864)."""

    frequencies: tuple[float, ...]  # radians per position
    scale: float = 1.0  # of cosine and sine (YaRN)
    is_interleaved: bool = False  # rotates neighbours (2i, 2i+1); else the halves (i, i + num_frequencies)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """A mixture of experts in place of a layer's feed-forward block."""

    num_experts: int
    num_active: int  # per token
    inner_size: int
    normalises: bool  # scale the weights of a token's experts to sum to one
    shared_inner_size: int = 0  # of the gated shared expert of all tokens; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What may differ between the layers of one decoder."""

    window: int | None = None  # sliding window in tokens, the query included; None: all tokens
    rotary: str | None = "all"  # key of `DecoderSpec.rotaries`; None: no positional embedding
    experts: ExpertsSpec | None = None  # None: one feed-forward block


@dataclass(frozen=True, slots=True, kw_only=True)
class NormNames:
    """Tensor names of the norms around a layer's two blocks; None: no norm."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """Everything that `Decoder` needs besides weights."""

    model_type: str
    vocab_size: int
    hidden_size: int
    inner_size: int  # of the feed-forward block
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    rotaries: dict[str, RotarySpec]
    norm_names: NormNames
    norm_eps: float
    norm_offset: float = 0.0  # added to every norm's weight
    query_key_norm: QueryKeyNorm | None = None
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    activation: str = "silu"
    attention_scale: float
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    logits_scale: float = 1.0
    embedding_scale: float = 1.0  # rounded to the weights' dtype before it is used, as Gemma does
    residual_scale: float = 1.0  # of a block's output
    is_tied: bool = False  # the head uses the embedding's weight


Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the configs of some `model_type`s differ from llama's."""

    fields: Callable[[PreTrainedConfig], Fields] = field(default=lambda config: {})
    layer: Callable[[PreTrainedConfig, int], Fields] = field(default=lambda config, index: {})
    refuses: Callable[[PreTrainedConfig], bool] = field(default=lambda config: False)
    is_interleaved: bool = False


def read_decoder_spec(config: PreTrainedConfig) -> DecoderSpec | None:
    """Return the spec of a model; None if its family, or a feature it uses, is not described here."""
    family = FAMILIES.get(config.model_type)
    if family is None or family.refuses(config):
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    has_bias = bool(getattr(config, "attention_bias", False))
    fields: Fields = {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "inner_size": config.intermediate_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "layers": tuple(LayerSpec(**family.layer(config, index)) for index in range(config.num_hidden_layers)),
        "rotaries": _read_rotaries(config, head_dim, family.is_interleaved),
        "norm_names": NormNames(),
        "norm_eps": config.rms_norm_eps,
        "has_qkv_bias": has_bias,
        "has_output_bias": has_bias,
        "has_mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "activation": getattr(config, "hidden_activation", None) or config.hidden_act,
        "attention_scale": head_dim**-0.5,
        "is_tied": bool(config.tie_word_embeddings),
    }
    spec = DecoderSpec(**{**fields, **family.fields(config)})
    return spec if spec.activation in ACTIVATIONS else None


def _read_rotaries(config: PreTrainedConfig, head_dim: int, is_interleaved: bool) -> dict[str, RotarySpec]:
    """Return one rotary embedding for all layers ("all"), or one for each type of layer."""
    parameters = config.rope_parameters
    if "rope_type" in parameters:
        return {"all": _read_rotary(config, parameters, head_dim, is_interleaved, None)}
    return {
        layer_type: _read_rotary(config, nested, head_dim, is_interleaved, layer_type)
        for layer_type, nested in parameters.items()
        if nested is not None
    }


def _read_rotary(
    config: PreTrainedConfig, parameters: Fields, head_dim: int, is_interleaved: bool, layer_type: str | None
) -> RotarySpec:
    if parameters["rope_type"] == "default":
        size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        frequencies = 1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)
        scale = 1.0
    else:
        options = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, scale = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), **options)
    return RotarySpec(frequencies=tuple(frequencies.tolist()), scale=float(scale), is_interleaved=is_interleaved)


# --- families ---


def _window_everywhere(config: PreTrainedConfig, index: int) -> Fields:
    return {"window": config.sliding_window}


def _window_by_type(config: PreTrainedConfig, index: int) -> Fields:
    is_sliding = config.layer_types[index] == "sliding_attention"
    return {"window": config.sliding_window if is_sliding else None}


def _no_biases(config: PreTrainedConfig) -> Fields:
    return {"has_qkv_bias": False, "has_output_bias": False, "has_mlp_bias": False}


def _gemma(config: PreTrainedConfig) -> Fields:
    return {"norm_offset": 1.0, "embedding_scale": config.hidden_size**0.5}


_AROUND_AS_GEMMA_2 = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def _gemma2(config: PreTrainedConfig) -> Fields:
    return {
        **_gemma(config),
        "norm_names": _AROUND_AS_GEMMA_2,
        "attention_scale": config.query_pre_attn_scalar**-0.5,
        "attention_softcap": config.attn_logit_softcapping,
        "logits_softcap": config.final_logit_softcapping,
    }


def _gemma3(config: PreTrainedConfig) -> Fields:
    return {**_gemma2(config), "attention_softcap": None, "query_key_norm": QueryKeyNorm.HEAD}


def _gemma3_layer(config: PreTrainedConfig, index: int) -> Fields:
    return {**_window_by_type(config, index), "rotary": config.layer_types[index]}


def _glm4(config: PreTrainedConfig) -> Fields:
    names = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
    return {"norm_names": names, "has_output_bias": False, "has_mlp_bias": False}


def _granite(config: PreTrainedConfig) -> Fields:
    return {
        "attention_scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logits_scale": 1.0 / config.logits_scaling,
    }


def _mixtral_layer(config: PreTrainedConfig, index: int) -> Fields:
    experts = ExpertsSpec(
        num_experts=config.num_local_experts,
        num_active=config.num_experts_per_tok,
        inner_size=config.intermediate_size,
        normalises=True,
    )
    return {**_window_everywhere(config, index), "experts": experts}


def _olmo2(config: PreTrainedConfig) -> Fields:
    names = NormNames(
        before_attention=None,
        after_attention="post_attention_layernorm",
        before_mlp=None,
        after_mlp="post_feedforward_layernorm",
    )
    return {
        "norm_names": names,
        "query_key_norm": QueryKeyNorm.ALL_HEADS,
        "has_mlp_bias": False,
    }


def _olmoe_layer(config: PreTrainedConfig, index: int) -> Fields:
    experts = ExpertsSpec(
        num_experts=config.num_experts,
        num_active=config.num_experts_per_tok,
        inner_size=config.intermediate_size,
        normalises=config.norm_topk_prob,
    )
    return {"window": getattr(config, "sliding_window", None), "experts": experts}


def _qwen2(config: PreTrainedConfig) -> Fields:
    return {"has_qkv_bias": True, "has_output_bias": False, "has_mlp_bias": False}


def _qwen2_moe(config: PreTrainedConfig) -> Fields:
    return {**_qwen2(config), "has_qkv_bias": config.qkv_bias}


def _qwen3(config: PreTrainedConfig) -> Fields:
    return {"query_key_norm": QueryKeyNorm.HEAD, "has_mlp_bias": False}


def _has_experts(config: PreTrainedConfig, index: int) -> bool:
    is_sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    return is_sparse and index not in config.mlp_only_layers


def _qwen_experts(config: PreTrainedConfig, index: int, *, shared_inner_size: int = 0) -> ExpertsSpec | None:
    if not _has_experts(config, index):
        return None
    return ExpertsSpec(
        num_experts=config.num_experts,
        num_active=config.num_experts_per_tok,
        inner_size=config.moe_intermediate_size,
        normalises=config.norm_topk_prob,
        shared_inner_size=shared_inner_size,
    )


def _qwen2_moe_layer(config: PreTrainedConfig, index: int) -> Fields:
    experts = _qwen_experts(config, index, shared_inner_size=config.shared_expert_intermediate_size)
    return {**_window_by_type(config, index), "experts": experts}


def _qwen3_moe_layer(config: PreTrainedConfig, index: int) -> Fields:
    return {**_window_everywhere(config, index), "experts": _qwen_experts(config, index)}


def _smollm3_layer(config: PreTrainedConfig, index: int) -> Fields:
    has_window = config.use_sliding_window and config.layer_types[index] == "sliding_attention"
    return {
        "window": config.sliding_window if has_window else None,
        "rotary": "all" if config.no_rope_layers[index] else None,
    }


def _looks_ahead(config: PreTrainedConfig) -> bool:
    return bool(getattr(config, "use_bidirectional_attention", False))


FAMILIES: dict[str, Family] = {
    "gemma": Family(fields=_gemma, refuses=_looks_ahead),
    "gemma2": Family(fields=_gemma2, layer=_window_by_type, refuses=_looks_ahead),
    "gemma3_text": Family(fields=_gemma3, layer=_gemma3_layer, refuses=_looks_ahead),
    "glm4": Family(fields=_glm4, is_interleaved=True),
    "granite": Family(fields=_granite),
    "llama": Family(),
    "ministral": Family(fields=_no_biases, layer=_window_by_type),
    "mistral": Family(fields=_no_biases, layer=_window_everywhere),
    "mixtral": Family(fields=_no_biases, layer=_mixtral_layer),
    "olmo2": Family(fields=_olmo2),
    "olmoe": Family(
        fields=lambda config: {"query_key_norm": QueryKeyNorm.ALL_HEADS, "has_mlp_bias": False},
        layer=_olmoe_layer,
        refuses=lambda config: config.clip_qkv is not None,
    ),
    "phi3": Family(fields=_no_biases, layer=_window_everywhere),
    "qwen2": Family(fields=_qwen2, layer=_window_by_type),
    "qwen2_moe": Family(fields=_qwen2_moe, layer=_qwen2_moe_layer),
    "qwen3": Family(fields=_qwen3, layer=_window_by_type),
    "qwen3_moe": Family(fields=_qwen3, layer=_qwen3_moe_layer),
    "smollm3": Family(layer=_smollm3_layer),
}
