"""Read a checkpoint's tensors into a model on the meta device; each rank reads only its slices."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain

import torch

from outrider.verifier_service.formats.checkpoint import Shard, TensorSource, WeightError

_SETTINGS = (bool, int, float, str, tuple)
_FUSED = re.compile(r"^(?P<owner>.*)\.(?P<kind>gate_up_proj(?=\.weight$)|gate_up_proj$|down_proj$)")
_EXPERT = re.compile(r"^(?P<experts>.*\.(experts|moe))\.(?P<kind>gate_up_proj|down_proj)$")


class MissingTensorsError(WeightError):
    """A checkpoint lacks tensors of its model, `names`; `present`: those of the same experts that it has."""

    def __init__(self, names: Sequence[str], present: Sequence[str] = ()) -> None:
        super().__init__(f"checkpoint has no tensor for {names[0]!r}")
        self.names, self.present = tuple(names), tuple(present)


class WeightReader:
    """Reads a checkpoint's tensors by the model's names, and finds the ones that were never read.

    `aliases`: (pattern, replacement) from the model's name to the checkpoint's, tried in order after the name itself.
    """

    def __init__(self, source: TensorSource, aliases: Sequence[tuple[str, str]] = ()) -> None:
        self._source, self._aliases = source, aliases
        self.used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return any(candidate in self._source for candidate in self._candidates(name))

    def read(self, name: str, shape: tuple[int, ...], shard: Shard | None = None) -> torch.Tensor:
        """Read a tensor of this shape, or one rank's slice of it; raises `WeightError`."""
        found = next((candidate for candidate in self._candidates(name) if candidate in self._source), None)
        if found is None:
            raise MissingTensorsError([name])
        if self._source.shape(found) != shape:
            has = self._source.shape(found)
            raise WeightError(f"checkpoint tensor {found!r} has shape {has}, the model expects {shape}")
        self.used.add(found)
        return self._source.read(found, shard)

    def read_part(self, names: Sequence[str], shape: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
        """Read this rank's slice, of this shape, of the first of `names` that the checkpoint has.

        A fused tensor of experts may be stored as one tensor per expert, as gate and up apart, or transposed. Raises
        `WeightError`.
        """
        for name in names:
            for source in self._candidates(name):
                if source in self._source:
                    self.used.add(source)
                    return _read_whole(self._source, source, shape, shard)
                if stacks := _stacked_sources(self._source, source):
                    self.used |= set(stacks)
                    return _read_stacked(self._source, stacks, shape, shard)
                if parts := _expert_sources(self._source, source, shape[0] if shape else 0):
                    self.used |= set(chain.from_iterable(parts))
                    return _read_experts(self._source, parts, shape, shard)
        raise MissingTensorsError(names[:1])

    def skip(self, name: str) -> None:
        """Count a tensor as used without reading it: a tied one."""
        self.used |= set(self._candidates(name))

    def require_all_used(self, ignored: Sequence[str] = ()) -> None:
        """Raise `WeightError` for a tensor that was never read and matches none of the patterns."""
        left = [name for name in self._source.names if name not in self.used and not is_matched(name, ignored)]
        if left:
            raise WeightError(f"checkpoint tensor {min(left)!r} has no place in the model")

    def _candidates(self, name: str) -> list[str]:
        """Return the name and all that one or two aliases make of it: a family's, then where the model begins."""
        once = self._renamed(name)
        return list(dict.fromkeys([name, *once, *chain.from_iterable(map(self._renamed, once))]))

    def _renamed(self, name: str) -> list[str]:
        return [re.sub(pattern, new, name) for pattern, new in self._aliases if re.search(pattern, name)]


def load_weights(
    model: torch.nn.Module,
    checkpoint: TensorSource,
    *,
    shards: Mapping[str, Shard],
    aliases: Sequence[tuple[str, str]] = (),
    ignored: Sequence[str] = (),
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Load every parameter and persistent buffer of `model` (on the meta device).

    `shards`: this rank's slice, by parameter name; the parameters must have the slices' shapes. `aliases`: as in
    `WeightReader`. `ignored`: patterns of tensors that the model does not use. Raises `WeightError`.
    """
    reader = WeightReader(checkpoint, aliases)
    read_into(model, reader, shards=shards, device=device, dtype=dtype)
    reader.require_all_used(ignored)


def read_into(
    model: torch.nn.Module,
    reader: WeightReader,
    *,
    shards: Mapping[str, Shard],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Read every parameter and persistent buffer of `model` (on the meta device); see `load_weights`.

    What the library keeps in float32 in any checkpoint, such as biases that choose experts, is read as float32.
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    wide = [rf"(^|\.){re.escape(part)}(\.|$)" for part in strict]
    for names in _tensors_of(model):
        shape = tuple(_lookup(model, names[0]).shape)
        shard = next((shards[name] for name in names if name in shards), None)
        value = reader.read_part(names, shape, shard)
        for name in names:
            reader.skip(name)
        _assign(model, names, value.to(device=device, dtype=torch.float32 if is_matched(names[0], wide) else dtype))


@torch.no_grad()
def copy_tensors(target: torch.nn.Module, source: torch.nn.Module) -> None:
    """Copy every tensor of `source` into the one at the same place in `target`, whose addresses stay.

    Both are built by the same code for one model, so that they have the same modules. Tensors that a module keeps as
    plain attributes (packed weights, wide norms) are copied, too.
    """
    for to, from_ in zip(target.modules(), source.modules(), strict=True):
        assert type(to) is type(from_), (type(to), type(from_))
        kept = _held(to)
        for name, tensor in _held(from_).items():
            kept[name].copy_(tensor)


def require_alike(served: torch.nn.Module, loaded: torch.nn.Module) -> None:
    """Raise `WeightError`, naming tensor or setting, unless `served` computes as `loaded` once it has its tensors.

    Both are built by the same code, each of its own checkpoint. Settings are what modules keep of a config as plain
    values, or in a dataclass.
    """
    ours, theirs = dict(served.named_modules()), dict(loaded.named_modules())
    for name in sorted(ours.keys() ^ theirs.keys()):
        raise WeightError(f"{name!r} is in the {'served' if name in ours else 'new'} model alone")
    for name, module in ours.items():
        prefix = f"{name}." if name else ""
        ours_here, theirs_here = _described(module), _described(theirs[name])
        for key in sorted(ours_here.keys() | theirs_here.keys()):
            own, other = ours_here.get(key), theirs_here.get(key)
            if own != other:
                raise WeightError(f"{prefix + key!r} is {other}, the served model's is {own}")


def require_finite(model: torch.nn.Module) -> None:
    """Raise `WeightError`, naming the tensor, unless all numbers of a model are finite."""
    for name, module in model.named_modules():
        for key, tensor in _held(module).items():
            plain = tensor if tensor.layout is torch.strided else tensor.to_dense()
            if not bool(torch.isfinite(plain).all()):
                raise WeightError(f"tensor {f'{name}.{key}' if name else key!r} has numbers that are not finite")


def _described(module: torch.nn.Module) -> dict[str, object]:
    """Describe a module's class, tensors and settings by name."""
    described: dict[str, object] = {"class": type(module).__name__}
    for name, value in vars(module).items():
        if isinstance(value, _SETTINGS):
            described[name] = value
        elif is_dataclass(value) and not isinstance(value, type):
            described |= {
                key: own
                for key, own in {field.name: getattr(value, field.name) for field in fields(value)}.items()
                if isinstance(own, _SETTINGS)
            }
    return described | {name: f"{tensor.dtype} {list(tensor.shape)}" for name, tensor in _held(module).items()}


def _held(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own tensors by attribute."""
    held = {**vars(module), **module._parameters, **module._buffers}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _tensors_of(model: torch.nn.Module) -> list[list[str]]:
    """Return the names of each distinct parameter and persistent buffer; a tied one has several."""
    persistent = model.state_dict(keep_vars=True)
    names: dict[int, list[str]] = {}
    for name, tensor in persistent.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def _read_checked(
    checkpoint: TensorSource, source: str, expected: tuple[int, ...], shard: Shard | None
) -> torch.Tensor:
    shape = list(checkpoint.shape(source))
    if shard is not None and len(shape) > shard.dim and shape[shard.dim] >= shard.stop:
        shape[shard.dim] = shard.stop - shard.start
    if tuple(shape) != expected:
        raise WeightError(f"checkpoint tensor {source!r} has shape {tuple(shape)}, the model expects {expected}")
    return checkpoint.read(source, shard)


def _read_whole(checkpoint: TensorSource, source: str, expected: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
    """Read a tensor that the checkpoint has under one name, fused experts included."""
    match = _EXPERT.match(source)
    if match is not None and checkpoint.shape(source) == (expected[0], expected[2], expected[1]) != expected:
        return checkpoint.read(source).transpose(1, 2).contiguous()
    if match is None or shard is None:
        return _read_checked(checkpoint, source, expected, shard)
    # [num_experts, rows, columns]: `shard` indexes one expert's gate, up or down tensor
    num_parts = 2 if match["kind"] == "gate_up_proj" else 1
    full = checkpoint.shape(source)
    stride = full[shard.dim + 1] // num_parts
    shape = list(expected)
    shape[shard.dim + 1] //= num_parts
    shards = [
        Shard(dim=shard.dim + 1, start=part * stride + shard.start, stop=part * stride + shard.stop)
        for part in range(num_parts)
    ]
    return torch.cat([_read_checked(checkpoint, source, tuple(shape), one) for one in shards], dim=shard.dim + 1)


def _stacked_sources(checkpoint: TensorSource, name: str) -> list[str]:
    """Return the names of the parts that a checkpoint has of a fused tensor; [] if it has none."""
    match = _FUSED.match(name)
    if match is None:
        return []
    parts = ["gate_proj", "up_proj"] if match["kind"] == "gate_up_proj" else ["down_proj"]
    names = [f"{match['owner']}.{part}.weight" for part in parts]
    return names if all(each in checkpoint for each in names) else []


def _read_stacked(
    checkpoint: TensorSource, sources: list[str], expected: tuple[int, ...], shard: Shard | None
) -> torch.Tensor:
    rows = len(expected) - 2
    shape = (*expected[:rows], expected[rows] // len(sources), *expected[rows + 1 :])
    inner = None if shard is None else Shard(dim=rows + shard.dim, start=shard.start, stop=shard.stop)
    return torch.cat([_read_checked(checkpoint, source, shape, inner) for source in sources], dim=rows)


def _expert_sources(checkpoint: TensorSource, name: str, num_experts: int) -> list[list[str]]:
    """Return the names of the tensors that make up a fused one, [num_experts][gate and up, or down]; [] if none."""
    match = _EXPERT.match(name)
    if match is None:
        return []
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        parts = [gate, up] if match["kind"] == "gate_up_proj" else [down]
        rows = [[f"{match['experts']}.{e}.{part}.weight" for part in parts] for e in range(num_experts)]
        present = [source for source in chain.from_iterable(rows) if source in checkpoint]
        if present:
            missing = [source for source in chain.from_iterable(rows) if source not in checkpoint]
            if missing:
                raise MissingTensorsError(missing, present)
            return rows
    return []


def _read_experts(
    checkpoint: TensorSource, sources: list[list[str]], expected: tuple[int, ...], shard: Shard | None
) -> torch.Tensor:
    """Fuse tensors of single experts into [num_experts, parts * rows, columns]; `shard` applies to each of them."""
    part_shape = (expected[1] // len(sources[0]), expected[2])
    fused = None
    for expert, parts in enumerate(sources):
        pieces = [_read_checked(checkpoint, source, part_shape, shard) for source in parts]
        if fused is None:
            fused = torch.empty(expected, dtype=pieces[0].dtype, device=pieces[0].device)
        torch.cat(pieces, out=fused[expert])
    assert fused is not None
    return fused


def _assign(model: torch.nn.Module, names: Sequence[str], value: torch.Tensor) -> None:
    is_parameter = isinstance(_lookup(model, names[0]), torch.nn.Parameter)
    tensor = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value
    for name in names:
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, tensor)


def _lookup(model: torch.nn.Module, name: str) -> torch.Tensor:
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)


def is_matched(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a tensor's name matches any of the patterns."""
    return any(re.search(pattern, name) for pattern in patterns)
