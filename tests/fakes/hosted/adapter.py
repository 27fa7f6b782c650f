"""A LoRA adapter of random weights, and the model that it makes of its target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

RANK, ALPHA = 4, 16
PROJECTIONS = ("q_proj", "v_proj")


def write_adapter(folder: Path, target: PreTrainedModel, seed: int = 0) -> None:
    """Write an adapter of the target's attention as PEFT does, and change the target into what it makes of it."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in target.named_modules():
        if name.endswith(PROJECTIONS):
            down = torch.randn(RANK, module.in_features, generator=generator) * 0.1
            up = torch.randn(module.out_features, RANK, generator=generator) * 0.1
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            module.weight.data += (ALPHA / RANK) * up @ down
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    config |= {"target_modules": list(PROJECTIONS), "bias": "none", "base_model_name_or_path": None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
