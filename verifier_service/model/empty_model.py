"""The library's model with our attention, before its weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from outrider.verifier_service.model.architectures import ARCHITECTURES
from outrider.verifier_service.model.attention import IMPLEMENTATION_NAME, register_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def build_empty_model(description: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Build the library's model with parameters on the meta device and computed buffers on `device`."""
    register_attention()
    with torch.device("meta"):
        model = text_model(description, dtype=dtype, attn_implementation=IMPLEMENTATION_NAME)
    make_computed_buffers(model, device)
    return model.eval().requires_grad_(False)


def text_model(description: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the library's causal model of a text config: alone, or in its multimodal model without the other parts."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    architecture = ARCHITECTURES.get(description.model_type)
    if architecture is None or architecture.whole is None:
        is_alone = description.model_type == "mistral4"  # which the library has in the other list, though it is text
        return (AutoModelForImageTextToText if is_alone else AutoModelForCausalLM).from_config(description, **options)
    whole = AutoConfig.for_model(architecture.whole, tie_word_embeddings=description.tie_word_embeddings)
    whole.text_config, whole.vision_config.num_hidden_layers = description, 1
    model: Any = AutoModelForImageTextToText.from_config(whole, **options)
    for name, part in list(model.model.named_children()):
        if part is not model.model.language_model:
            setattr(model.model, name, None)
    return model


def make_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute the buffers that checkpoints lack (rope frequencies, embedding scales), as the library does."""
    for module in model.modules():
        names = module._non_persistent_buffers_set
        for name in names:
            buffer = getattr(module, name)
            setattr(module, name, torch.full_like(buffer, float("nan"), device=device))
        if names:
            model._init_weights(module)  # parameters are still on the meta device: only buffers get values
