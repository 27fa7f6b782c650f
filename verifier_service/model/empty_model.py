"""The library's model with our attention, before its weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from outrider.verifier_service.model.attention import IMPLEMENTATION_NAME, register_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def build_empty_model(description: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the library's model with parameters on the meta device and computed buffers on `device`."""
    from transformers import AutoModelForCausalLM

    register_attention()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(description, dtype=dtype, attn_implementation=IMPLEMENTATION_NAME)
    make_computed_buffers(model, device)
    return model.eval().requires_grad_(False)


def make_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that checkpoints lack (rope frequencies, embedding scales), as the library does."""
    for module in model.modules():
        names = module._non_persistent_buffers_set
        for name in names:
            buffer = getattr(module, name)
            setattr(module, name, torch.full_like(buffer, float("nan"), device=device))
        if names:
            model._init_weights(module)  # parameters are still on the meta device: only buffers get values
