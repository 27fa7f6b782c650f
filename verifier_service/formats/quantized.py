"""Quantised checkpoints read as plain ones: each weight is dequantised when it is read, whole or one rank's slice.

    quantization_config ─▶ layouts ─▶ which tensors of the files are a weight's codes and scales
    read("x.weight", slice) ─▶ its blocks of codes and scales ─▶ a floating-point slice

Tensors without scales are read as they are, so that modules a checkpoint leaves unquantised need no list of names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.verifier_service.formats.checkpoint import Checkpoint, Shard, WeightError
from outrider.verifier_service.formats.layouts import (
    AWQ,
    FP8,
    FP8_INVERSE,
    INT8,
    INT8_SCALES,
    MXFP4,
    MXFP4_PACKED,
    NVFP4,
    NVFP4_MODELOPT,
    PACK_QUANTIZED,
    Layout,
    Shape,
    gptq,
)
from outrider.verifier_service.formats.stated import FIELD, Config, stated_config

QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8")
# of activations and of the KV cache, neither of which is quantised here
_UNUSED = re.compile(
    r"\.(input_scale(_inv)?|input_zero_point|input_global_scale|activation_scale(_inv)?|[qkv]_scale|[qkv]_zero_point|"
    r"kv_scale|output_scale)$"
)


class FormatError(WeightError):
    """A checkpoint's weights are quantised in a way that is not read; the text names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """What a `quantization_config` says of the weights."""

    layouts: tuple[Layout, ...]
    blocks: tuple[int, ...] = ()  # sizes of blocks and groups


def read_format(folder: Path) -> Format | None:
    """Return how a folder's weights are quantised, by config.json or ModelOpt's own file; None: they are not.

    Raises `FormatError`.
    """
    config = stated_config(folder)
    return None if config is None else format_of(config)


def format_of(config: Config) -> Format:
    """Return what a `quantization_config` says of the weights. Raises `FormatError` naming the field."""
    method = config.get("quant_method")
    _require("quant_method", method, tuple(_METHODS))
    return Format(layouts=_METHODS[str(method)](config), blocks=tuple(_blocks(config)))


def _blocks(config: Config) -> Iterator[int]:
    """Yield the sizes of blocks and groups that a config names, whatever for."""
    for name, value in config.items():
        if name in ("weight_block_size", "block_structure", "group_size"):
            yield from (size for size in (value if isinstance(value, list) else [value]) if _is_size(size))
        elif isinstance(value, Mapping):
            yield from _blocks(value)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and value > 0


def _compressed_tensors(config: Config) -> tuple[Layout, ...]:
    groups = (config.get("config_groups") or {}).values()
    for given in (config.get("format"), *(group.get("format") for group in groups)):
        _require("format", given or "dense", _COMPRESSED)
    for group in groups:
        _require("num_bits", (group.get("weights") or {}).get("num_bits", 8), (4, 8))
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise FormatError(f"{FIELD}.sparsity_config: sparse weights are not read")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise FormatError(f"{FIELD}.transform_config: turned weights are not read")
    return PACK_QUANTIZED, MXFP4_PACKED, NVFP4, FP8, INT8  # NVFP4 has MXFP4's tensors and one more


def _gptq(config: Config) -> tuple[Layout, ...]:
    _require("bits", config.get("bits"), (4, 8))
    _require("checkpoint_format", config.get("checkpoint_format", "gptq"), ("gptq", "gptq_v2"))
    return (gptq(config["bits"], zero_offset=1 if config.get("checkpoint_format", "gptq") == "gptq" else 0),)


def _awq(config: Config) -> tuple[Layout, ...]:
    _require("bits", config.get("bits", config.get("w_bit")), (4,))
    _require("version", str(config.get("version", "gemm")).lower(), ("gemm",))
    return (AWQ,)


def _modelopt(config: Config) -> tuple[Layout, ...]:
    _require("quant_algo", config.get("quant_algo"), ("FP8", "NVFP4", "MIXED_PRECISION"))
    return NVFP4_MODELOPT, FP8


def _require(name: str, given: object, known: tuple[object, ...]) -> None:
    if given not in known:
        raise FormatError(f"{FIELD}.{name}: {given!r} is not read, only {', '.join(map(str, known))}")


_COMPRESSED = (
    *("float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "nvfp4-pack-quantized"),
    *("mxfp4-pack-quantized", "mixed-precision", "dense"),
)
_METHODS: dict[str, Callable[[Config], tuple[Layout, ...]]] = {
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": lambda config: (FP8,),
    "fp8": lambda config: (FP8_INVERSE, FP8),
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": lambda config: (MXFP4,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A quantised weight."""

    layout: Layout
    parts: dict[str, str]  # names of its tensors by suffix
    shape: Shape
    has_row_scales: bool  # one for each row of a matrix


class PlainTensors:
    """A checkpoint's tensors as floating-point numbers of 16 bits or more; a `TensorSource`.

    Dequantised ones are of `dtype` and on `device`. With `keeps_int8`, scales of int8 weights can be read, too, by
    whoever makes those weights int8 again. Raises `WeightError` for a quantised tensor without its scales.
    """

    def __init__(
        self, files: Checkpoint, found: Format | None, dtype: torch.dtype, device: torch.device, *, keeps_int8: bool
    ) -> None:
        self._files, self._dtype, self._device = files, dtype, device
        self._blocks = () if found is None else found.blocks
        layouts = () if found is None else found.layouts
        self._stored = dict(self._find(layouts))
        parts = {name for stored in self._stored.values() for name in stored.parts.values()}
        self.names: Iterable[str] = [
            *self._stored,
            *(name for name in files.names if name not in parts and not (layouts and _UNUSED.search(name))),
        ]
        self.kept = frozenset(name for name, stored in self._stored.items() if keeps_int8 and _is_int8(name, stored))
        self._known = {*self.names, *(self._stored[name].parts[INT8_SCALES] for name in self.kept)}

    def _find(self, layouts: Iterable[Layout]) -> Iterator[tuple[str, _Stored]]:
        """Yield the weights that are held in these layouts, by their plain names; of two that fit, the last counts."""
        for layout in layouts:
            for needed in self._files.names:
                base = needed.removesuffix(layout.needs)
                codes = base + layout.codes
                if base == needed or codes not in self._files or self._files.dtype(codes) not in layout.dtypes:
                    continue
                parts = {
                    suffix: base + suffix for suffix in (layout.codes, layout.needs, *layout.required, *layout.optional)
                }
                present = {suffix: name for suffix, name in parts.items() if name in self._files}
                for suffix in layout.required:
                    if suffix not in present:
                        raise WeightError(f"checkpoint tensor {codes!r} ({layout.name}) lacks {parts[suffix]!r}")
                shapes = {suffix: self._shape_of(name) for suffix, name in present.items()}
                shape = layout.shape(shapes)
                by_row = shapes[layout.needs] == (shape[0], 1)
                yield base + layout.plain, _Stored(layout=layout, parts=present, shape=shape, has_row_scales=by_row)

    def _shape_of(self, name: str) -> Shape:
        """Return the shape of a part; of one that is a weight's shape, that."""
        if name.endswith(".weight_shape"):
            return tuple(self._files.read(name).tolist())
        return self._files.shape(name)

    @property
    def bytes_read(self) -> int:
        return self._files.bytes_read

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored.get(name)
        return self._files.shape(name) if stored is None else stored.shape

    def is_plain(self, name: str) -> bool:
        return name in self._stored or self._files.is_plain(name)

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        """Read a tensor, or one rank's slice of it."""
        stored = self._stored.get(name)
        if stored is not None:
            try:
                return self._dequantized(stored, shard)
            except ValueError as error:
                raise WeightError(f"checkpoint tensor {name!r} ({stored.layout.name}): {error}") from error
        if (dtype := self._files.dtype(name)) in QUANTIZED_DTYPES:
            raise WeightError(f"checkpoint tensor {name!r} is {dtype}, and nothing says how it is quantised")
        return self._files.read(name, shard)

    def _dequantized(self, stored: _Stored, shard: Shard | None) -> torch.Tensor:
        layout, shape = stored.layout, list(stored.shape)
        if shard is None:
            parts = {suffix: self._placed(name, None) for suffix, name in stored.parts.items()}
            return layout.dequantize(parts, stored.shape, self._blocks).to(self._dtype)
        shapes = {suffix: self._files.shape(name) for suffix, name in stored.parts.items()}
        cut = layout.cut(shapes, stored.shape, self._blocks, shard.dim, shard.start, shard.stop)
        ranges = {suffix: Shard(dim=dim, start=start, stop=stop) for suffix, (dim, start, stop) in cut.ranges.items()}
        parts = {suffix: self._placed(name, ranges.get(suffix)) for suffix, name in stored.parts.items()}
        shape[shard.dim] = cut.last - cut.first
        whole = layout.dequantize(parts, tuple(shape), self._blocks)
        return whole.narrow(shard.dim, shard.start - cut.first, shard.stop - shard.start).to(self._dtype)

    def _placed(self, name: str, shard: Shard | None) -> torch.Tensor:
        return self._files.read(name, shard).to(self._device)

    @property
    def summary(self) -> str | None:
        """What was dequantised, what not, and the memory that each takes; None: nothing was quantised."""
        sizes = {name: math.prod(stored.shape) for name, stored in self._stored.items()}
        kept = sum(sizes[name] for name in self.kept)
        lines = [f"integers of a scale for each row stay int8: {kept / 1e9:.3g} GB"] if kept else []
        if wide := self._stored.keys() - self.kept:
            kinds = ", ".join(sorted({self._stored[name].layout.name for name in wide}))
            held = sum(self._files.num_bytes(part) for name in wide for part in self._stored[name].parts.values())
            plain, dtype = sum(sizes[name] for name in wide) * self._dtype.itemsize, str(self._dtype)[len("torch.") :]
            took = f"{plain / 1e9:.3g} GB of {dtype}, {held / 1e9:.3g} GB in the files"
            lines.append(f"{kinds} weights are dequantised at load: {took}")
        return "; ".join(lines) or None


def _is_int8(name: str, stored: _Stored) -> bool:
    """Whether our int8 products compute with a weight's codes: symmetric, a scale for each row; no experts.

    Packed ones of 4 bits, too: they take a byte each, and are the same numbers.
    """
    layout = stored.layout
    is_symmetric = stored.parts.keys() == {layout.codes, layout.needs, *layout.required}
    return layout in (INT8, PACK_QUANTIZED) and is_symmetric and stored.has_row_scales and ".experts." not in name


@contextmanager
def open_checkpoint(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    keeps_int8: bool = False,
) -> Iterator[PlainTensors]:
    """Open a folder's tensors, dequantised by its config.json; see `PlainTensors`. Raises `WeightError`."""
    found, device = read_format(folder), torch.device("cpu") if device is None else device
    with Checkpoint(folder) as files:
        yield PlainTensors(files, found, dtype, device, keeps_int8=keeps_int8)
