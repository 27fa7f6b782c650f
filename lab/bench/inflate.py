"""Make a small Llama checkpoint cost as much as a large one without changing a single output.

    gate_proj, up_proj   [ original rows | random rows ]       the added units compute something ...
    down_proj            [ original columns | zeros ]          ... that weighs nothing in the result

The same function, hence the same acceptance rate, with the arithmetic and memory traffic of a wider model: a chosen
target-to-draft cost ratio with real acceptance where no large weights are at hand. Say so beside any figure made so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

WIDTH_MULTIPLE = 64
SHARD_BYTES = 2 << 30
WIDENED_ROWS = (".mlp.gate_proj.weight", ".mlp.up_proj.weight")
WIDENED_COLUMNS = ".mlp.down_proj.weight"
NUM_MLP_MATRICES = 3


def inflate(source: Path, destination: Path, num_parameters: int) -> None:
    """Write a copy of the Llama checkpoint `source` with about `num_parameters` parameters to `destination`.

    Weights are streamed one tensor at a time into shards of at most 2 GiB; tokenizer and other files are copied.
    Raises `ValueError` when the architecture is another one, its MLP has biases, or the wanted count is below the
    source's own.
    """
    config = json.loads((source / "config.json").read_text())
    _check_architecture(config)
    width = _wanted_width(config, _count_parameters(source), num_parameters)
    destination.mkdir(parents=True, exist_ok=True)
    _copy_other_files(source, destination)
    (destination / "config.json").write_text(json.dumps(config | {"intermediate_size": width}, indent=2) + "\n")
    _write_shards(_widened(source, config["intermediate_size"], width), destination)


def _check_architecture(config: dict[str, Any]) -> None:
    if config.get("model_type") != "llama":
        raise ValueError(f"only Llama checkpoints can be inflated, this is {config.get('model_type')!r}")
    if config.get("mlp_bias"):
        raise ValueError("a Llama checkpoint with MLP biases cannot be inflated")


def _wanted_width(config: dict[str, Any], num_present: int, num_wanted: int) -> int:
    """Return the intermediate size, a multiple of 64 unless it stays as it is, that comes nearest to `num_wanted`."""
    if num_wanted < num_present:
        raise ValueError(f"the checkpoint has {num_present} parameters already, more than {num_wanted}")
    num_per_unit = NUM_MLP_MATRICES * config["hidden_size"] * config["num_hidden_layers"]
    exact = config["intermediate_size"] + (num_wanted - num_present) / num_per_unit
    return max(config["intermediate_size"], round(exact / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def _weight_files(source: Path) -> list[Path]:
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"no safetensors files in {source}")
    return files


def _count_parameters(source: Path) -> int:
    """Return the number of stored parameters; read from the headers alone."""
    total = 0
    for file in _weight_files(source):
        with safe_open(file, framework="pt") as weights:
            total += sum(torch.Size(weights.get_slice(name).get_shape()).numel() for name in weights.keys())  # noqa: SIM118
    return total


def _widened(source: Path, old_width: int, width: int) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the wide checkpoint, one at a time."""
    generator = torch.Generator().manual_seed(0)
    for file in _weight_files(source):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                weight = weights.get_tensor(name)
                if name.endswith(WIDENED_ROWS):
                    weight = torch.cat([weight, _noise_like(weight, width - old_width, generator)])
                elif name.endswith(WIDENED_COLUMNS):
                    weight = torch.nn.functional.pad(weight, (0, width - old_width))
                yield name, weight


def _noise_like(weight: Tensor, num_rows: int, generator: torch.Generator) -> Tensor:
    """Draw rows of the weight's own scale, so that the added units are neither idle nor able to overflow."""
    noise = torch.randn(num_rows, weight.shape[1], generator=generator) * weight.float().std()
    return noise.to(weight.dtype)  # [num_rows, hidden_size]


def _copy_other_files(source: Path, destination: Path) -> None:
    for file in source.iterdir():
        is_weights = file.suffix == ".safetensors" or file.name == "model.safetensors.index.json"
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copy(file, destination)


def _write_shards(tensors: Iterator[tuple[str, Tensor]], destination: Path) -> None:
    """Write tensors in shards with the index that transformers reads."""
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    shard_bytes = total_bytes = num_shards = 0
    for name, tensor in tensors:
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            weight_map |= _save_shard(shard, num_shards, destination)
            shard, shard_bytes, num_shards = {}, 0, num_shards + 1
        shard[name] = tensor.contiguous()
        shard_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    weight_map |= _save_shard(shard, num_shards, destination)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (destination / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _save_shard(shard: dict[str, Tensor], index: int, destination: Path) -> dict[str, str]:
    file_name = f"model-{index:05d}.safetensors"
    save_file(shard, destination / file_name, metadata={"format": "pt"})
    return dict.fromkeys(shard, file_name)
