"""A checkpoint's tensors, read slice by slice."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import safe_open

INDEX_NAME = "model.safetensors.index.json"
PLAIN_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class WeightError(ValueError):
    """A checkpoint does not fit its model; the text names the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The half-open range `[start, stop)` of dimension `dim` that this rank holds of a checkpoint tensor."""

    dim: int
    start: int
    stop: int


class TensorSource(Protocol):
    """Named tensors that can be read slice by slice."""

    @property
    def names(self) -> Iterable[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def is_plain(self, name: str) -> bool:
        """Whether a tensor's numbers are floating point of 16 bits or more: a quantised one needs its scales."""

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor: ...


class StateDictSource:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def is_plain(self, name: str) -> bool:
        return self._tensors[name].dtype in PLAIN_DTYPES.values()

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        tensor = self._tensors[name]
        part = tensor if shard is None else tensor.narrow(shard.dim, shard.start, shard.stop - shard.start)
        return part.clone()


class Checkpoint:
    """The tensors of a folder of safetensors files, read slice by slice; `bytes_read` counts.

    An index says which tensors there are, and in which files. Raises `WeightError` if a file lacks one, or, without an
    index, if two files have the same one.
    """

    def __init__(self, folder: Path) -> None:
        self.bytes_read = 0
        self._stack = ExitStack()
        index = folder / INDEX_NAME
        with self._stack:  # files that do not fit together are closed
            self._owner = self._indexed(index) if index.is_file() else self._found(folder)
            if not self._owner:
                raise WeightError(f"{folder}: no tensors in *.safetensors")
            self._stack = self._stack.pop_all()

    def _indexed(self, index: Path) -> dict[str, Any]:
        """Open the files of an index; return its tensors' files by name."""
        places = json.loads(index.read_text()).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
            raise WeightError(f"{index.name} has no weight_map of tensors' files")
        if strange := next((place for place in places.values() if Path(place).name != place), None):
            raise WeightError(f"{index.name} names {strange!r}, which is no file of its folder")
        files = {place: self._open(index.parent / place) for place in sorted(set(places.values()))}
        present = {place: set(file.keys()) for place, file in files.items()}
        for name, place in places.items():
            if name not in present[place]:
                raise WeightError(f"{index.name} says that {name!r} is in {place}, which lacks it")
        return {name: files[place] for name, place in places.items()}

    def _found(self, folder: Path) -> dict[str, Any]:
        """Open all files of a folder; return their tensors' files by name."""
        files = {path.name: self._open(path) for path in sorted(folder.glob("*.safetensors"))}
        places: dict[str, str] = {}
        for place, file in files.items():
            for name in file.keys():  # noqa: SIM118
                if name in places:
                    raise WeightError(f"{name!r} is in {places[name]} and in {place}, and no {INDEX_NAME} says which")
                places[name] = place
        return {name: files[place] for name, place in places.items()}

    def _open(self, path: Path) -> Any:
        if not path.is_file():
            raise WeightError(f"{INDEX_NAME} names {path.name}, which is not there")
        return self._stack.enter_context(safe_open(path, framework="pt"))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def names(self) -> Iterable[str]:
        return self._owner.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._owner

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._owner[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return a tensor's dtype by safetensors' name, as `BF16`, `F8_E4M3`."""
        return self._owner[name].get_slice(name).get_dtype()

    def num_bytes(self, name: str) -> int:
        bits = re.search(r"\d+", self.dtype(name))  # `BOOL` has none
        return math.prod(self.shape(name)) * int(bits[0] if bits else 8) // 8

    def is_plain(self, name: str) -> bool:
        return self.dtype(name) in PLAIN_DTYPES

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        """Read a tensor, or one rank's slice of it."""
        handle: Any = self._owner[name].get_slice(name)
        index = [slice(None)] * len(handle.get_shape())
        if shard is not None:
            index[shard.dim] = slice(shard.start, shard.stop)
        tensor = handle[tuple(index)] if index else self._owner[name].get_tensor(name)
        self.bytes_read += tensor.nbytes
        return tensor
