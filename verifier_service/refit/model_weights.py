"""A model's weights as a whole: whether a source has all of them, and their copy into the storage that serves.

The check runs the very code that builds a model, over tensors without data. So whatever it lets pass can be copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from outrider.verifier_service.formats.checkpoint import Shard, TensorSource, WeightError
from outrider.verifier_service.formats.quantized import PlainTensors
from outrider.verifier_service.model.architectures import checkpoint_names, load_model_description
from outrider.verifier_service.model.decoder import Decoder
from outrider.verifier_service.model.decoder_spec import read_decoder_spec
from outrider.verifier_service.model.decoder_weights import decoder_parts
from outrider.verifier_service.model.empty_model import build_empty_model
from outrider.verifier_service.model.library_model import LibraryModel, finish, load_library_model
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import plan_shards, shrink
from outrider.verifier_service.model.weights import (
    MissingTensorsError,
    WeightReader,
    copy_tensors,
    is_matched,
    read_into,
)

META = torch.device("meta")
MAX_UNUSED_BYTES = 1 << 26  # of one bucket


class ModelWeights:
    """The weights of one rank's model."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._aliases, self._ignored = checkpoint_names(runner.description)

    def require_same_model(self, folder: Path) -> None:
        """Raise `WeightError` if the folder's config.json, if it has one, describes a model that computes otherwise."""
        if not (folder / "config.json").is_file():
            return
        found, own = load_model_description(folder, self._runner.config), self._runner.description
        same_type = found.model_type == own.model_type
        if not same_type or read_decoder_spec(found) != read_decoder_spec(own):
            raise WeightError(f"{folder / 'config.json'} describes another model than the one that is served")

    def missing(self, source: TensorSource) -> tuple[str, ...]:
        """Return the tensors that a source lacks. Raises `WeightError` naming one that does not fit, or has no place.

        Reads no data. Refuses all for experts in host memory, and other formats for weights that stay int8.
        """
        if self._runner.config.num_cached_experts is not None:
            raise WeightError("num_cached_experts: experts in host memory take no new weights while they are served")
        if self._runner.kept_int8 != (source.kept if isinstance(source, PlainTensors) else frozenset()):
            raise WeightError(
                "quantization_config: weights that stay int8 take none of another format while they are served"
            )
        reader = _ShapeReader(_Shapes(source), self._aliases)
        runner, spec = self._runner, read_decoder_spec(self._runner.description)
        if spec is not None:
            for _ in decoder_parts(spec, reader, runner.group, dtype=runner.dtype, device=META):
                pass
        else:
            empty = build_empty_model(runner.description, dtype=runner.dtype, device=torch.device("cpu"))
            shards = plan_shards(empty, runner.group)
            shrink(empty, shards)
            read_into(empty, reader, shards=shards, device=META, dtype=runner.dtype)
        reader.require_all_used(self._ignored)
        return tuple(sorted(reader.missing))

    def require_small(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise `WeightError` if tensors that the model has no use for, whose shapes nothing bounds, are large."""
        num_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if is_matched(name, self._ignored))
        if num_bytes > MAX_UNUSED_BYTES:
            raise WeightError(f"shapes: {num_bytes} bytes are of tensors that the model does not use")

    def copy(self, source: TensorSource) -> None:
        """Copy a complete source into the model; `missing` was asked before. Addresses stay.

        Needs memory for embedding and head or for one layer. The library's models are read whole: they need as much
        memory again as they have.
        """
        runner, model = self._runner, self._runner.model
        if isinstance(model, Decoder):
            parts = decoder_parts(
                *(model.spec, WeightReader(source, self._aliases), runner.group),
                dtype=runner.dtype,
                device=runner.device,
                quantization=runner.config.quantization,
            )
            for name, part in parts:
                copy_tensors(model.get_submodule(name), part)
            return
        assert isinstance(model, LibraryModel)
        names = {"aliases": self._aliases, "ignored": self._ignored}
        where = {"dtype": runner.dtype, "device": runner.device}
        read = load_library_model(runner.description, source, runner.group, **names, **where)  # type: ignore[arg-type]
        copy_tensors(model.model, finish(read, runner.group, runner.vocab_size).model)


class _Shapes:
    """Another source's tensors without their data."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source

    @property
    def names(self) -> Iterable[str]:
        return self._source.names

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def is_plain(self, name: str) -> bool:
        return self._source.is_plain(name)

    def read(self, name: str, shard: Shard | None = None) -> torch.Tensor:
        if not self.is_plain(name):
            raise WeightError(f"checkpoint tensor {name!r} is not of a floating-point dtype of 16 bits or more")
        return _without_data(self.shape(name), shard)


class _ShapeReader(WeightReader):
    """Goes on without the tensors that a source lacks, and notes them."""

    def __init__(self, source: TensorSource, aliases: Sequence[tuple[str, str]]) -> None:
        super().__init__(source, aliases)
        self.missing: set[str] = set()

    def read(self, name: str, shape: tuple[int, ...], shard: Shard | None = None) -> torch.Tensor:
        try:
            return super().read(name, shape, shard)
        except MissingTensorsError as error:
            self.missing |= {*error.names}
            return _without_data(shape, shard)

    def read_part(self, names: Sequence[str], shape: tuple[int, ...], shard: Shard | None) -> torch.Tensor:
        try:
            return super().read_part(names, shape, shard)
        except MissingTensorsError as error:
            self.missing |= {*error.names}
            self.used |= {*error.present}
            return _without_data(shape, None)


def _without_data(shape: Sequence[int], shard: Shard | None) -> torch.Tensor:
    sizes = list(shape)
    if shard is not None:
        sizes[shard.dim] = shard.stop - shard.start
    return torch.empty(sizes, device=META)
