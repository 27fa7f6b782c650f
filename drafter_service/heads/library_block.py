"""The decoder layer of a target's family, as the library has it, for a prediction layer that is one of them.

DeepSeek's, GLM's and MiMo's prediction layers are blocks like the target's: latent attention, experts, windows, sinks.
The library's one-layer model of the same config has that block and its rotary embedding.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from outrider.drafter_service.heads.head_layer import CPU, META, Attend, HeadError, PooledAttend
from outrider.verifier_service.model.architectures import ARCHITECTURES, batch_dependent_rope
from outrider.verifier_service.model.attention import LayerShape, ShapeRecorder, entered
from outrider.verifier_service.model.empty_model import build_empty_model
from outrider.verifier_service.model.latent_attention import keep_latents, read_every_key
from outrider.verifier_service.model.library_model import decoder_layers

# what a family's prediction layer is, where it is not like the target's last one
_KINDS: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]},
}


def describe_block(folder: Path) -> PreTrainedConfig:
    """Read a target's config and return that of its prediction layer: one layer, the kind of the last.

    Raises `HeadError` for a family whose layers the library has not, or that our engine does not serve.
    """
    description = AutoConfig.from_pretrained(folder).get_text_config()
    if description.model_type not in ARCHITECTURES:
        raise HeadError(f"model_type: a head with a layer of {description.model_type!r} is not served")
    if batch_dependent_rope(description.rope_parameters) is not None:
        raise HeadError("rope_parameters: they depend on the longest position of the batch")
    fields, count = description.to_dict(), description.num_hidden_layers
    last = {name: each[-1:] for name, each in fields.items() if isinstance(each, list) and len(each) == count}
    own = _KINDS.get(description.model_type, {})
    for name in ("per_layer_config", "quantization_config"):
        fields.pop(name, None)
    one = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    return type(description).from_dict({**fields, **last, **one, **own})


def describe_latent(plain: Mapping[str, Any]) -> PreTrainedConfig:
    """Build the config of a dense layer with latent attention, DeepSeek-V3's, which Kimi-K2's is."""
    fields = {name: value for name, value in plain.items() if name not in ("model_type", "architectures", "auto_map")}
    return AutoConfig.for_model("deepseek_v3", **{**fields, "first_k_dense_replace": fields["num_hidden_layers"]})


def over_rows_of(attention: Any, input_size: int) -> nn.Module:
    """Give the library's latent attention, whose tensors are not there yet, rows of another size."""
    for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"):
        if (linear := getattr(attention, name)) is not None:
            setattr(attention, name, nn.Linear(input_size, linear.out_features, linear.bias is not None, device=META))
    return attention


def in_pool(attend: Attend) -> PooledAttend:
    """Return a head's attention as the library's layers enter it; raises `HeadError` where there is no pool."""
    if not isinstance(attend, PooledAttend):
        raise HeadError("a head with the library's layer attends in a pool of keys and values")
    return attend


class LibraryBlock(nn.Module):
    """One layer over a head's KV; its tensors are on the meta device until they are read."""

    def __init__(self, description: PreTrainedConfig) -> None:
        super().__init__()
        model = build_empty_model(description, dtype=torch.float32, device=CPU)
        parent, name = decoder_layers(model)
        self.layer: Any = getattr(parent, name)[0]
        rotary: Any = parent.rotary_emb
        self.rotary = rotary
        takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
        self._rotary_arguments = description.layer_types[:1] if takes_type else []

    def attend_in_pool(self) -> None:
        """Prepare the layer, whose tensors are there, for attention in a pool of keys and values."""
        keep_latents(self.layer)
        read_every_key(self.layer)

    def shape(self) -> LayerShape:
        """Return the shape of its keys and values, recorded from a forward pass over one pair."""
        recorder = ShapeRecorder()
        weight = next(self.layer.parameters())
        hidden = weight.new_zeros(1, 1, self.layer.input_layernorm.weight.shape[0])
        with torch.inference_mode(), entered(recorder):
            self._forward(hidden, torch.zeros(1, 1, dtype=torch.long, device=weight.device))
        return recorder.shapes[0]

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Map [batch, length, hidden_size] to the same shape; positions int64 [batch, length]."""
        with entered(in_pool(attend)):
            return self._forward(hidden, positions)

    def _forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        turn = self.rotary(hidden, positions, *self._rotary_arguments)
        found = self.layer(hidden_states=hidden, position_embeddings=turn, position_ids=positions, attention_mask=None)
        return found[0] if isinstance(found, tuple) else found
