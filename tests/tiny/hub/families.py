"""Tiny random checkpoints of the model families in docs/models.md: whole configs, written under hub names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tiny.models import COMMON

WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
ROUTED |= {"n_group": 1, "topk_group": 1}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,  # of the rotary part
    "num_key_value_heads": 4,
}
STEP = {
    **WINDOWED,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "mlp_layer_types": ["dense", "sparse"],
    "num_sliding_attention_heads": 4,
}
SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
INDEXED = {"index_topk": 160, "index_head_dim": 16, "index_n_heads": 2, "n_group": 1, "topk_group": 1}
SMALL_VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
DOTS_VISION = {**SMALL_VISION, "mlp_layer_types": ["dense"], "adapter_in_dim": 32, "adapter_out_dim": 64}
DOTS_AUDIO = {**SMALL_VISION, "adapter_input_size": 32, "adapter_out_dim": 64, "downsample_hidden_size": 8}


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    """One architecture as people's checkpoints have it."""

    model_type: str  # of the whole model
    text: dict[str, Any] = field(default_factory=dict)  # what its text part changes of `COMMON`
    whole: dict[str, Any] | None = None  # a multimodal model's own fields; None: there is only text
    # what the hub's tensors are, where the library writes others
    hub: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]] | None = None
    is_text: bool = False  # the checkpoint is of the text part alone

    @property
    def text_type(self) -> str:
        """The model_type of the text part, as the engine serves it."""
        named = str(self.text.get("model_type", self.model_type))
        return {"step3p7": "step3p5", "kimi_k2": "deepseek_v3", "dots3_note": "dots3_note_text"}.get(named, named)


def layers_not_blocks(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Undo the vision tower's word for a layer, which the library writes in Kimi's text part, too."""
    return name.replace("language_model.model.blocks.", "language_model.model.layers."), tensor


def transposed_experts(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Store experts as [num_experts, inputs, outputs]."""
    is_fused = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return name, tensor.transpose(1, 2).contiguous() if is_fused else tensor


FAMILIES: dict[str, TinyFamily] = {
    "gemma-4-dense": TinyFamily(
        model_type="gemma4",
        text={
            **WINDOWED,
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        whole={"vision_config": SMALL_VISION, "audio_config": None, "tie_word_embeddings": True},
    ),
    "gemma-4-moe": TinyFamily(
        model_type="gemma4",
        text={
            **WINDOWED,
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": True,
        },
        whole={"vision_config": SMALL_VISION, "audio_config": None, "tie_word_embeddings": True},
    ),
    "gemma-4-small": TinyFamily(
        model_type="gemma4",
        text={
            "model_type": "gemma4_text",
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 256,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "tie_word_embeddings": True,
        },
        whole={"vision_config": SMALL_VISION, "audio_config": None, "tie_word_embeddings": True},
    ),
    "gemma-4-unified": TinyFamily(
        model_type="gemma4_unified",
        text={
            **WINDOWED,
            "model_type": "gemma4_unified_text",
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
        whole={
            "vision_config": {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 8, "patch_size": 4},
            "audio_config": None,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-vl-moe": TinyFamily(
        model_type="qwen3_vl_moe",
        text={**EXPERTS, "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 24, "rope_parameters": SECTIONS},
        whole={"vision_config": {**SMALL_VISION, "deepstack_visual_indexes": [0]}},
        hub=transposed_experts,
    ),
    "mimo-v2": TinyFamily(
        model_type="mimo_v2_flash",
        text={**ROUTED, **WINDOWED, "v_head_dim": 8, "num_key_value_heads": 1, "n_routed_experts": 4},
    ),
    "ernie-4.5-moe": TinyFamily(
        model_type="ernie4_5_moe", text={"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}
    ),
    "llama-3.1": TinyFamily(model_type="llama"),
    "llama-4": TinyFamily(
        model_type="llama4",
        text={
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "intermediate_size": 32,
            "intermediate_size_mlp": 48,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 160,
            "floor_scale": 161,
        },
        whole={"vision_config": {**SMALL_VISION, "intermediate_size": 32, "vision_output_dim": 32}},
    ),
    "muse-glimmer": TinyFamily(
        model_type="muse_glimmer",
        text={**WINDOWED, "model_type": "muse_glimmer_text"},
        whole={"vision_config": SMALL_VISION, "out_hidden_size": 64, "projector_hidden_size": 32},
    ),
    "mistral-medium-3.5": TinyFamily(
        model_type="mistral3",
        text={"model_type": "ministral3"},
        whole={"vision_config": {**SMALL_VISION, "model_type": "pixtral"}, "tie_word_embeddings": False},
    ),
    "mistral-small-4": TinyFamily(
        model_type="mistral3",
        text={**ROUTED, **LATENT, "model_type": "mistral4"},
        whole={"vision_config": {**SMALL_VISION, "model_type": "pixtral"}, "tie_word_embeddings": False},
    ),
    "kimi-k2.5": TinyFamily(
        model_type="kimi_k25",
        text={**ROUTED, **LATENT, "model_type": "kimi_k2"},
        whole={"vision_config": SMALL_VISION, "projection_hidden_size": 32, "tie_word_embeddings": False},
        hub=layers_not_blocks,
    ),
    "deepseek-v3": TinyFamily(
        model_type="deepseek_v3", text={**ROUTED, **LATENT, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}
    ),
    "deepseek-v3.2": TinyFamily(model_type="deepseek_v32", text={**ROUTED, **LATENT, **INDEXED}),
    "glm-5": TinyFamily(model_type="glm_moe_dsa", text={**ROUTED, **LATENT, **INDEXED}),
    "dots3-note": TinyFamily(
        model_type="dots3_note",
        text={**ROUTED, **LATENT, **INDEXED, **WINDOWED, "layer_types": ["indexed_attention", "sliding_attention"]},
        whole={"vision_config": DOTS_VISION, "audio_config": DOTS_AUDIO},
    ),
    "minimax-m3": TinyFamily(
        model_type="minimax_m3_vl",
        text={
            "model_type": "minimax_m3_vl_text",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "dense_intermediate_size": 32,
            "shared_intermediate_size": 32,
            "rotary_dim": 8,
            "index_head_dim": 16,
            "index_block_size": 4,
            "index_topk_blocks": 40,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "mlp_layer_types": ["dense", "sparse"],
        },
        whole={"vision_config": SMALL_VISION},
    ),
    "gpt-oss": TinyFamily(model_type="gpt_oss", text={**WINDOWED, **EXPERTS, "num_local_experts": 4}),
    "laguna": TinyFamily(
        model_type="laguna",
        text={**EXPERTS, **WINDOWED, "shared_expert_intermediate_size": 32},
    ),
    "step-3.5": TinyFamily(model_type="step3p7", text=STEP, whole={"vision_config": SMALL_VISION}, is_text=True),
    "step-3.7": TinyFamily(model_type="step3p7", text=STEP, whole={"vision_config": SMALL_VISION}),
    "hy3": TinyFamily(model_type="hy_v3", text={**EXPERTS, "mlp_layer_types": ["dense", "sparse"]}),
    "glm-4.5": TinyFamily(model_type="glm4_moe", text={**ROUTED, "use_qk_norm": True}),
    "glm-ocr": TinyFamily(
        model_type="glm_ocr",
        text={"model_type": "glm_ocr_text", "rope_parameters": {**SECTIONS, "partial_rotary_factor": 1.0}},
        whole={"vision_config": SMALL_VISION},
    ),
    "minimax-m2": TinyFamily(
        model_type="minimax_m2", text={"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}
    ),
}


def family_config(name: str, **changes: Any) -> PreTrainedConfig:
    """Describe a family's whole model."""
    family = FAMILIES[name]
    text = {**COMMON, **family.text, **changes}
    fields = text if family.whole is None else {**family.whole, "text_config": text, "initializer_range": 0.3}
    return AutoConfig.for_model(family.model_type, **fields)


def make_family(name: str, **changes: Any) -> PreTrainedModel:
    """Build a family's whole model with the library's own attention; biases and norms are random too."""
    config = family_config(name, **changes)
    is_multimodal = config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    kind = AutoModelForImageTextToText if is_multimodal else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = kind.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        for tensor in model.parameters():
            if tensor.ndim == 1:  # ones and zeros would hide a missing norm or bias
                tensor.add_(torch.randn_like(tensor) * 0.2)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return model.requires_grad_(False)


def make_family_checkpoint(folder: Path, name: str, **changes: Any) -> PreTrainedModel:
    """Write a family's checkpoint, its tensors named as on the hub, and return the model."""
    model = make_family(name, **changes)
    model.save_pretrained(folder)
    family = FAMILIES[name]
    if family.hub is not None:
        tensors = dict(family.hub(*item) for item in load_file(folder / "model.safetensors").items())
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if family.is_text:
        model.config.text_config.save_pretrained(folder)
    return model
