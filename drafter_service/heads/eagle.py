"""EAGLE-1: one decoder layer over the target's final states and the embeddings of the next tokens.

Li et al. 2024 (arXiv 2401.15077). State and embedding are concatenated and projected (`fc`); the layer has no norm
before its attention. Its output stands in for the target's state: the target's output embedding gives the prediction,
and with the next token's embedding it is the next input. A checkpoint has no final norm and no output embedding.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedConfig

from outrider.drafter_service.heads.head_files import HeadFiles, write_head
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
    unborrowed,
)
from outrider.verifier_service.messages.draft import FINAL_TAP


class EagleHead(DraftHead):
    """An EAGLE-1 head; `has_fc_bias`: whether the checkpoint's `fc` has a bias."""

    def __init__(self, layer: PreTrainedConfig, *, has_fc_bias: bool = False) -> None:
        super().__init__(layer, taps=(FINAL_TAP,), state_size=layer.hidden_size)
        if layer.num_hidden_layers != 1:
            raise HeadError(f"num_hidden_layers: {layer.num_hidden_layers}, an EAGLE-1 head is served with 1")
        size = layer.hidden_size
        self.embed_tokens = nn.Embedding(self.vocab_size, size)
        self.fc = nn.Linear(2 * size, size, bias=has_fc_bias)
        self.layers = nn.ModuleList([HeadLayer(layer, has_input_norm=False)])
        self.lm_head = nn.Linear(size, self.vocab_size, bias=False)

    def forward(
        self,
        token_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend = attend_causally,
    ) -> HeadOutput:
        hidden = self.fc(torch.cat([self.embed_tokens(token_ids), hidden], dim=-1))
        hidden = self.layers[0](hidden, self.rotary(hidden, positions), attend)
        return HeadOutput(output=hidden, feedback=hidden)

    @classmethod
    def begin(cls, files: HeadFiles, num_target_layers: int | None) -> tuple[EagleHead, TensorNames]:
        layer = describe_layer(files.config)
        with META:
            return cls(layer, has_fc_bias="fc.bias" in files), TensorNames()

    def save(self, folder: Path) -> None:
        """Write the checkpoint in the authors' format, without the target's tensors."""
        config = {**self.description.to_diff_dict(), "architectures": ["LlamaForCausalLMEagle"]}
        write_head(folder, config, unborrowed(self))
