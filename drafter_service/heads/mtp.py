"""MTP: the prediction layer that was trained with the target, in the target's checkpoint.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): norms over embedding and final state, a projection of both (`eh_proj`), a
block like the target's, a norm before the shared output embedding. For a second token and more, the layer continues
from its own normed output. Three layouts of the same computation are read: DeepSeek's
(`model.layers.{num_hidden_layers}.*`), Qwen3-Next's (`mtp.*`) and the `speculators` library's (`mtp_layers.0.*`). Only
blocks of the llama family are supported: DeepSeek's latent attention and experts are refused by their model_type.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig

from outrider.drafter_service.heads.head_files import HeadFiles
from outrider.drafter_service.heads.head_layer import (
    META,
    Attend,
    DraftHead,
    HeadError,
    HeadLayer,
    HeadOutput,
    TensorNames,
    attend_causally,
    describe_layer,
    make_norm,
)
from outrider.verifier_service.messages.draft import FINAL_TAP

# (pattern, replacement) of our names; other names are the block's, and follow the prefix unchanged
Layout = Sequence[tuple[str, str]]
DEEPSEEK: Layout = (
    (r"^layer\.", ""),
    (r"^norm\.", "shared_head.norm."),
    (r"^lm_head\.", "shared_head.head."),
)
QWEN: Layout = (
    (r"^layer\.", "layers.0."),
    (r"^eh_proj\.", "fc."),
    (r"^enorm\.", "pre_fc_norm_embedding."),
    (r"^hnorm\.", "pre_fc_norm_hidden."),
)
SPECULATORS: Layout = (
    (r"^layer\.", ""),
    (r"^eh_proj\.", "input_proj."),
    (r"^enorm\.", "token_layernorm."),
    (r"^hnorm\.", "hidden_layernorm."),
    (r"^norm\.", "final_layernorm."),
)


class MtpHead(DraftHead):
    """One MTP layer: the first, which continues the target's states."""

    is_in_target = True

    def __init__(self, layer: PreTrainedConfig) -> None:
        super().__init__(layer, taps=(FINAL_TAP,), state_size=layer.hidden_size)
        size = layer.hidden_size
        self.embed_tokens = nn.Embedding(self.vocab_size, size)
        self.enorm, self.hnorm = make_norm(layer), make_norm(layer)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = HeadLayer(layer)
        self.norm = make_norm(layer)
        self.lm_head = nn.Linear(size, self.vocab_size, bias=False)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend = attend_causally,
    ) -> HeadOutput:
        joined = torch.cat([self.enorm(self.embed_tokens(token_ids)), self.hnorm(hidden)], dim=-1)
        hidden = self.eh_proj(joined)
        normed = self.norm(self.layer(hidden, self.rotary(hidden, positions), attend))
        return HeadOutput(output=normed, feedback=normed)

    @classmethod
    def begin(cls, files: HeadFiles, num_target_layers: int | None) -> tuple[MtpHead, TensorNames]:
        layer = describe_layer(files.config.get("transformer_layer_config", files.config))
        prefix, layout = find_layout(files)
        own = re.escape(prefix)  # of the first MTP layer: Qwen's later ones are `mtp.layers.1.*` and so on
        skipped = re.compile(rf"^(?!{own})|^{own}layers\.[1-9]|rotary_emb")
        with META:
            return cls(layer), TensorNames(lambda name: prefix + _renamed(name, layout), skipped)


def find_layout(files: HeadFiles) -> tuple[str, Layout]:
    """Return the prefix and the names of a checkpoint's first MTP layer; raises `HeadError`."""
    candidates: list[tuple[str, str, Layout]] = [
        (f"model.layers.{files.config.get('num_hidden_layers', 0)}.", "eh_proj.weight", DEEPSEEK),
        ("mtp.", "fc.weight", QWEN),
        ("model.mtp.", "fc.weight", QWEN),
        ("mtp_layers.0.", "input_proj.weight", SPECULATORS),
    ]
    for prefix, probe, layout in candidates:
        if prefix + probe in files:
            return prefix, layout
    tried = ", ".join(repr(prefix + probe) for prefix, probe, _ in candidates)
    raise HeadError(f"{files.folder}: no MTP layer, looked for {tried}")


def _renamed(name: str, layout: Layout) -> str:
    for pattern, new in layout:
        if re.search(pattern, name):
            return re.sub(pattern, new, name)
    return name
