"""A random mixture whose experts are not taken alike, each layer having favourites of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from tiny.models import make_model

COMMON_SHARE = 0.4  # size of what all tokens have in common, beside what is each one's own


def skewed_mixture(*, skews: tuple[float, ...], seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """Build an OLMoE of as many layers as there are `skews`: 0 leaves a layer's routing as it is drawn.

    All embeddings share a direction, and each router is turned towards or away from it, expert by expert.
    """
    model = make_model("olmoe", seed=seed, num_hidden_layers=len(skews), **sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        common = torch.randn(embedding.shape[1], generator=generator)
        embedding.copy_(embedding / embedding.std() + COMMON_SHARE * common)
        for layer, skew in zip(model.model.layers, skews, strict=True):
            layer.self_attn.o_proj.weight.mul_(0.1)  # so that tokens, not their positions, decide
            layer.mlp.experts.down_proj.mul_(0.1)
            layer.post_attention_layernorm.weight.fill_(1.0)
            router = layer.mlp.gate.weight
            favour = torch.randn(router.shape[0], generator=generator)
            router.copy_(router / router.std() / router.shape[1] ** 0.5)
            router.add_(skew * favour[:, None] * common / common.square().sum())
    return model
