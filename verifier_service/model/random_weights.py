"""Checkpoints without weights: a folder with a config and a recipe, from which tensors are drawn at random.

Their models have the cost of real ones, without download or disk. On one kind of device, a tensor's values depend only
on its name: a model of the first layers of another is a drafter for it. `tail_scale` scales the residual updates of
all later layers, and so sets the acceptance.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from outrider.verifier_service.formats.checkpoint import Shard

RECIPE_NAME = "random_weights.json"
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_WRITES_RESIDUAL = re.compile(r"\.(o_proj|down_proj)\.weight$")


class RandomWeights:
    """Random tensors for a config; a `TensorSource`."""

    def __init__(
        self,
        description: PreTrainedConfig,
        *,
        num_head_layers: int,
        tail_scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(description)
        self._shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._num_head_layers, self._tail_scale = num_head_layers, tail_scale
        self._dtype, self._device = dtype, device
        self.bytes_read = 0

    @property
    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def is_plain(self, name: str) -> bool:
        return True

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        """Draw a whole tensor and return a rank's slice: norms are ones; matrices preserve the scale of their input."""
        shape = self._shapes[name]
        if len(shape) == 1:
            whole = torch.ones(shape, dtype=self._dtype, device=self._device)
        else:
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=generator, dtype=self._dtype, device=self._device)
            whole *= 1.0 if "embed_tokens" in name else shape[-1] ** -0.5 * self._weight_of(name)
        return whole if shard is None else whole.narrow(shard.dim, shard.start, shard.stop - shard.start).clone()

    def _weight_of(self, name: str) -> float:
        layer = _LAYER.search(name)
        is_tail = layer is not None and int(layer.group(1)) >= self._num_head_layers
        return self._tail_scale if is_tail and _WRITES_RESIDUAL.search(name) else 1.0


def write_recipe(folder: Path, config: dict[str, Any], *, num_head_layers: int, tail_scale: float) -> None:
    """Write a checkpoint folder: a config, and how its tensors are drawn."""
    folder.mkdir(parents=True)
    AutoConfig.for_model(**config).save_pretrained(folder)
    recipe = {"num_head_layers": num_head_layers, "tail_scale": tail_scale}
    (folder / RECIPE_NAME).write_text(json.dumps(recipe) + "\n")


def read_recipe(
    folder: Path, description: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device
) -> RandomWeights | None:
    """Return the tensors of a checkpoint without weights; None if the folder has no recipe."""
    path = folder / RECIPE_NAME
    if not path.is_file():
        return None
    return RandomWeights(description, **json.loads(path.read_text()), dtype=dtype, device=device)
