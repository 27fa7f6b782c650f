"""Targets with a prediction layer under the hub's names, and what that layer computes, by the library's modules."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from outrider.drafter_service.heads.library_block import describe_block
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.empty_model import text_model
from tiny.hub.families import make_family_checkpoint

HIDDEN_SIZE = 64
BLOCK_SIZE = 16  # of a `ModelConfig`
DEEPSEEK_NAMES = (("norm.", "shared_head.norm."),)
MIMO_V2_NAMES = (("norm.", "final_layernorm."), ("post_attention_layernorm.", "pre_mlp_layernorm."))


@dataclass(frozen=True, kw_only=True)
class PredictionLayer:
    """Where a family's checkpoints have their prediction layer."""

    family: str
    prefix: str
    names: Sequence[tuple[str, str]] = DEEPSEEK_NAMES  # (ours, theirs)


PREDICTION_LAYERS = {
    "deepseek-v3": PredictionLayer(family="deepseek-v3", prefix="model.layers.2."),
    "deepseek-v3.2": PredictionLayer(family="deepseek-v3.2", prefix="model.layers.2."),
    "glm-4.5": PredictionLayer(family="glm-4.5", prefix="model.layers.2."),
    "glm-5": PredictionLayer(family="glm-5", prefix="model.layers.2."),
    "glm-ocr": PredictionLayer(family="glm-ocr", prefix="model.language_model.layers.2."),
    "mimo-v2": PredictionLayer(family="mimo-v2", prefix="model.mtp.layers.0.", names=MIMO_V2_NAMES),
}


class Reference:
    """What a prediction layer says, whole sequences at a time, by the library's own layer with its own attention."""

    def __init__(self, folder: Path, parts: dict[str, torch.Tensor], target: PreTrainedModel) -> None:
        self.parts, self.target = parts, target
        self.block = _one_layer(folder)
        self._text = getattr(self.block.model, "language_model", self.block.model)
        self._text.norm.weight.data.copy_(parts["norm."])
        self.eps = self.block.config.get_text_config().rms_norm_eps

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """Return the logits of each pair (state, next token): [len(token_ids) - 1, vocab_size]."""
        embedded = self.target.get_input_embeddings()(torch.tensor(token_ids[1:]))
        size = (HIDDEN_SIZE,)
        normed = F.rms_norm(embedded, size, self.parts["enorm."], self.eps)
        joined = torch.cat([normed, F.rms_norm(states, size, self.parts["hnorm."], self.eps)], dim=1)
        hidden = joined @ self.parts["eh_proj."].T
        output = self._text(inputs_embeds=hidden[None], use_cache=False).last_hidden_state[0]
        return output @ self.target.get_output_embeddings().weight.T


def write_prediction_layer(folder: Path, name: str) -> Reference:
    """Write a target's checkpoint with its prediction layer, and return what that computes."""
    case = PREDICTION_LAYERS[name]
    target = make_family_checkpoint(folder, case.family)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    norms = {name: 1 + 0.2 * torch.randn(HIDDEN_SIZE, generator=generator) for name in ("enorm.", "hnorm.", "norm.")}
    projection = torch.randn(HIDDEN_SIZE, 2 * HIDDEN_SIZE, generator=generator) * 0.2
    reference = Reference(folder, {**norms, "eh_proj.": projection}, target)
    layer = {key: tensor for key, tensor in _hub_tensors(reference.block).items() if ".layers.0." in key}
    own = {re.sub(r"^.*\.layers\.0\.", "", key): tensor for key, tensor in layer.items()}
    own |= {f"{key}weight": tensor for key, tensor in reference.parts.items()}
    for ours, theirs in case.names:
        own = {re.sub(rf"^{re.escape(ours)}", theirs, key): tensor for key, tensor in own.items()}
    tensors = load_file(folder / "model.safetensors") | {case.prefix + key: tensor for key, tensor in own.items()}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return reference


def _one_layer(folder: Path) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        block = text_model(describe_block(folder), attn_implementation="eager", dtype=torch.float32).eval()
        for name, tensor in block.state_dict().items():
            if tensor.ndim == 1 or name.endswith("e_score_correction_bias"):
                tensor.add_(torch.randn_like(tensor) * 0.2)
    return block.requires_grad_(False)


def _hub_tensors(model: PreTrainedModel) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def pairs(token_ids: list[int], start: int, stop: int) -> ScheduledBatch:
    """Schedule the pairs [start, stop) of a sequence."""
    return ScheduledBatch(
        token_ids=token_ids[start + 1 : stop + 1],
        positions=list(range(start, stop)),
        slot_mapping=list(range(start, stop)),
        query_lengths=[stop - start],
        context_lengths=[stop],
        block_tables=[list(range(-(-stop // BLOCK_SIZE)))],
        logits_indices=list(range(stop - start)),
    )
