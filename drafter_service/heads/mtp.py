"""MTP: the prediction layer that was trained with the target, in the target's checkpoint.

DeepSeek-V3 (arXiv 2412.19437, section 2.2): norms over embedding and final state, a projection of both (`eh_proj`), a
block like the target's, a norm before the shared output embedding. For a second token and more, the layer continues
from its own normed output. Five layouts of the same computation are read: that of DeepSeek and GLM
(`model.layers.{num_hidden_layers}.*`), Qwen3-Next's (`mtp.*`), MiMo's (`model.mtp_layers.0.*`, whose projection reads
the state first), MiMo-V2's (`model.mtp.layers.0.*`) and the `speculators` library's (`mtp_layers.0.*`). A block of the
llama family is ours; another one, with latent attention or experts, is the library's (`library_block`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig

from outrider.drafter_service.heads.head_files import HeadFiles
from outrider.drafter_service.heads.head_layer import (
    CPU,
    LAYER_FAMILIES,
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
from outrider.drafter_service.heads.library_block import LibraryBlock, describe_block
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.architectures import ARCHITECTURES
from outrider.verifier_service.model.attention import LayerShape

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
MIMO_V2: Layout = (
    (r"^layer\.post_attention_layernorm\.", "pre_mlp_layernorm."),
    (r"^layer\.", ""),
    (r"^norm\.", "final_layernorm."),
)
TEXT_PARTS = ("model.", "model.language_model.", "language_model.model.")  # where a target's layers are


class MtpHead(DraftHead):
    """One MTP layer: the first, which continues the target's states."""

    is_in_target = True
    _block: LibraryBlock | None = None

    def __init__(self, layer: PreTrainedConfig) -> None:
        super().__init__(layer, taps=(FINAL_TAP,), state_size=layer.hidden_size)
        size = layer.hidden_size
        self.embed_tokens = nn.Embedding(self.vocab_size, size)
        self.enorm, self.hnorm = make_norm(layer), make_norm(layer)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.reads_state_first = False
        self.layer = HeadLayer(layer) if self._block is None else self._block.layer
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
        if self._block is None:
            normed = self.norm(self.layer(hidden, self.rotary(hidden, positions), attend))
        else:
            normed = self.norm(self._block(hidden, positions, attend))
        return HeadOutput(output=normed, feedback=normed)

    def make_rotary(self) -> nn.Module:
        if self.description.model_type in LAYER_FAMILIES:
            return super().make_rotary()
        with CPU:  # what is computed is never on the meta device
            block = LibraryBlock(self.description)
        self.__dict__["_block"] = block  # its layer is this head's, its rotary embedding too
        self.not_captured = "a prediction layer of the library's is run operation by operation"
        return block.rotary

    @property
    def layer_shape(self) -> LayerShape:
        return super().layer_shape if self._block is None else self._block.shape()

    def finish(self) -> None:
        if self.reads_state_first:
            state, embedding = self.eh_proj.weight.chunk(2, dim=1)
            self.eh_proj.weight = nn.Parameter(torch.cat([embedding, state], dim=1), requires_grad=False)
        if self._block is not None:
            self._block.attend_in_pool()

    @classmethod
    def begin(cls, files: HeadFiles, num_target_layers: int | None) -> tuple[MtpHead, TensorNames]:
        plain = files.config.get("transformer_layer_config", files.config)
        is_plain = plain.get("model_type", "llama") in LAYER_FAMILIES
        layer = describe_layer(plain) if is_plain else describe_block(files.folder)
        prefix, layout = find_layout(files)
        aliases = None if is_plain else ARCHITECTURES[layer.model_type].aliases
        own = re.escape(prefix)  # of the first MTP layer: Qwen's later ones are `mtp.layers.1.*` and so on
        skipped = re.compile(rf"^(?!{own})|^{own}layers\.[1-9]|rotary_emb")
        with META:
            head = cls(layer)
        head.reads_state_first = ".mtp_layers." in prefix
        return head, TensorNames(lambda name: prefix + _renamed(name, layout), skipped, aliases)


def find_layout(files: HeadFiles) -> tuple[str, Layout]:
    """Return the prefix and the names of a checkpoint's first MTP layer; raises `HeadError`."""
    count = files.config.get("text_config", files.config).get("num_hidden_layers", 0)
    candidates: list[tuple[str, str, Layout]] = [
        *((f"{part}layers.{count}.", "eh_proj.weight", DEEPSEEK) for part in TEXT_PARTS),
        ("model.mtp.layers.0.", "eh_proj.weight", MIMO_V2),
        ("model.mtp_layers.0.", "input_proj.weight", SPECULATORS),
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
