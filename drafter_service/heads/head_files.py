"""Read the checkpoints of drafting heads: one `config.json` and named tensors, each taken once and checked.

Trainers write heads in many layouts. So nothing is skipped silently: an error names a tensor that is missing, unused or
of another shape or dtype, and a bad value of the config.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from outrider.verifier_service.formats.checkpoint import INDEX_NAME, StateDictSource, TensorSource, WeightError
from outrider.verifier_service.formats.quantized import open_checkpoint
from outrider.verifier_service.model.weights import WeightReader

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_PICKLED_INDEX = "pytorch_model.bin.index.json"
_PICKLED = ("pytorch_model*.bin", "medusa_lm_head.pt")


class HeadFiles:
    """A head's checkpoint while it is read. Every error is a `WeightError` (a `ValueError`) that names the folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any], source: TensorSource) -> None:
        self.folder = folder
        self.config = config
        self.source = source
        self._taken: set[str] = set()

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors, taken or not."""
        return list(self.source.names)

    def __contains__(self, name: str) -> bool:
        return name in self.source

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape without reading it."""
        self._require_tensor(name)
        return self.source.shape(name)

    def take(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        aliases: Sequence[tuple[str, str]] | None = None,
    ) -> torch.Tensor:
        """Read a tensor as `dtype`; a float tensor is no integer one, nor the reverse.

        `aliases`: those of a model's family, as in `WeightReader`, of which the layer is: its experts may be apart.
        """
        if aliases is not None and name not in self.source:
            reader = WeightReader(self.source, aliases)
            tensor = reader.read_part([name], tuple(shape), None)
            self._taken |= reader.used
            return tensor.to(dtype)
        self._require_tensor(name)
        found = self.source.shape(name)
        if found != tuple(shape):
            raise self.error(f"tensor {name!r} has shape {found}, expected {tuple(shape)}")
        self._taken.add(name)
        tensor = self.source.read(name)
        if tensor.is_floating_point() != dtype.is_floating_point:
            raise self.error(f"tensor {name!r} has dtype {tensor.dtype}, expected one like {dtype}")
        return tensor.to(dtype)

    def skip(self, name: str) -> None:
        """Mark a tensor as deliberately unused."""
        self._taken.add(name)

    def require_all_taken(self) -> None:
        """Raise for tensors that were not taken: the checkpoint is of another kind."""
        unknown = sorted(set(self.source.names) - self._taken)
        if unknown:
            raise self.error(f"tensor {unknown[0]!r} has no place in the model ({len(unknown)} such tensors)")

    def integer(self, *keys: str, default: int | None = None, at_least: int = 1) -> int:
        """Return the first present one of several config keys."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
                raise self.error(f"{CONFIG_NAME}: {key} must be an integer of at least {at_least}, not {value!r}")
            return value
        if default is None:
            raise self.error(f"{CONFIG_NAME}: {' or '.join(keys)} is missing")
        return default

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean of the config."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"{CONFIG_NAME}: {key} must be true or false, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        """Return a number of the config."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(f"{CONFIG_NAME}: {key} must be a number, not {value!r}")
        return float(value)

    def error(self, problem: str) -> WeightError:
        """Return an error that names the folder."""
        return WeightError(f"{self.folder}: {problem}")

    def _require_tensor(self, name: str) -> None:
        if name not in self.source:
            raise self.error(f"tensor {name!r} is missing")


@contextmanager
def opened(folder: Path | str) -> Iterator[HeadFiles]:
    """Open a head's checkpoint: safetensors, sharded or not, else PyTorch's files, without running their code."""
    folder = Path(folder)
    config = read_json(folder / CONFIG_NAME)
    if any(folder.glob("*.safetensors")):
        with ExitStack() as stack:
            try:
                checkpoint = stack.enter_context(open_checkpoint(folder))
            except SafetensorError as error:
                raise WeightError(f"{folder}: not a safetensors file: {error}") from error
            yield HeadFiles(folder, config, checkpoint)
    else:
        yield HeadFiles(folder, config, StateDictSource(_unpickled(folder)))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `WeightError` if the file has none."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise WeightError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightError(f"{path}: must hold an object, not {type(value).__name__}")
    return value


def write_head(
    folder: Path | str,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype | None = None,
    file_name: str = WEIGHTS_NAME,
) -> None:
    """Write a head's checkpoint, with floats as `dtype`; None: unchanged."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, tensor in tensors.items():
        kept = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
        stored[name] = kept.clone(memory_format=torch.contiguous_format)  # safetensors refuses shared memory
    floats = {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()}
    named = {"dtype": str(next(iter(floats))).removeprefix("torch.")} if len(floats) == 1 else {}
    (folder / CONFIG_NAME).write_text(json.dumps({**config, **named}, indent=2) + "\n")
    save_file(stored, folder / file_name, metadata={"format": "pt"})


def _unpickled(folder: Path) -> dict[str, torch.Tensor]:
    paths = _pickled_files(folder)
    if not paths:
        raise WeightError(f"{folder}: neither *.safetensors nor {' nor '.join(_PICKLED)}")
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        if not path.is_file():
            raise WeightError(f"{folder}: {_PICKLED_INDEX} names {path.name}, which is not there")
        tensors |= _load_tensors(path)
    return tensors


def _pickled_files(folder: Path) -> list[Path]:
    index = folder / _PICKLED_INDEX
    if index.is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
        if strange := next((name for name in names if Path(name).name != name), None):
            raise WeightError(f"{folder}: {_PICKLED_INDEX} names {strange!r}, which is no file of its folder")
        return [folder / name for name in names]
    return next((found for pattern in _PICKLED if (found := sorted(folder.glob(pattern)))), [])


def weight_files(folder: Path) -> list[str]:
    """Return the names of a checkpoint's files that its weights and settings are read from."""
    patterns = (CONFIG_NAME, "*.safetensors", INDEX_NAME, *_PICKLED, _PICKLED_INDEX)
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern)})


def _load_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken or malicious pickle may raise anything
        raise WeightError(f"{path}: not a file of plain tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise WeightError(f"{path}: must hold a dict of tensors by name")
    return tensors
