"""KV and tapped states of a sequence's positions, as bytes: read from one verifier's pools, written to another's.

The bytes have the KV heads of all ranks in order, so that giver and taker may have other numbers of ranks. Rank 0
gathers them and spreads them; its followers hear of it on their pipes, like of a batch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.verifier_service.messages.batch import slots_of
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.model.architectures import resolve_folder
from outrider.verifier_service.model.attention import movable
from outrider.verifier_service.model.runner import ModelRunner

DIGEST = "digest of the checkpoint"  # finding in `StartMemory`
_VOLATILE = ("_name_or_path", "transformers_version")  # of a configuration: they say nothing of the model


class KVBytes(Protocol):
    """The KV of one engine. Call it between two steps."""

    fingerprint: str  # see `kv_fingerprint`
    num_bytes_per_token: int

    def read(self, block_table: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Return the bytes of positions [start, stop): uint8 [stop - start, num_bytes_per_token], on the host."""

    def write(self, block_table: Sequence[int], start: int, stop: int, data: torch.Tensor) -> None:
        """Store what `read` returned elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadKV:
    """To a follower: take part in reading these slots."""

    slots: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteKV:
    """To a follower: take part in writing these slots."""

    slots: Sequence[int]


class RankKV:
    """One rank's share. `read` and `write` are collective: all ranks call them in the same order."""

    def __init__(self, runner: ModelRunner) -> None:
        self._pool, self._group = runner.pool, runner.group
        config = runner.description.get_text_config()
        num_heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self._num_sharing = max(1, self._group.size // num_heads)  # neighbouring ranks that have the same head
        layers = sorted(self._pool.keys)
        caches = (cache for layer in layers for cache in (self._pool.keys[layer], self._pool.values[layer]))
        self._caches = list(map(movable, caches))
        self._dtype = self._caches[0].dtype

    @property
    def num_bytes_per_token(self) -> int:
        """All ranks' heads together."""
        return sum(math.prod(self._whole_shape(cache)) for cache in self._caches) * self._dtype.itemsize

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        """Return all ranks' keys and values of some slots: uint8 [num_slots, num_bytes_per_token], on the host."""
        rows = torch.tensor(slots, dtype=torch.int64, device=self._pool.device)
        found = [
            self._group.all_gather(cache.index_select(0, rows), dim=1)[:, :: self._num_sharing].flatten(1)
            for cache in self._caches
        ]
        return torch.cat(found, dim=1).view(torch.uint8).cpu()

    def write(self, slots: Sequence[int], data: torch.Tensor | None = None) -> None:
        """Store keys and values of some slots; rank 0 has the `data` for all, as `read` returns it."""
        rows = torch.tensor(slots, dtype=torch.int64, device=self._pool.device)
        shapes = [self._whole_shape(cache) for cache in self._caches]
        width = sum(map(math.prod, shapes))
        if data is None:
            values = torch.empty(len(slots), width, dtype=self._dtype, device=self._pool.device)
        else:
            values = data.view(self._dtype).to(self._pool.device)
        parts = self._group.broadcast(values).split([math.prod(shape) for shape in shapes], dim=1)
        for cache, shape, part in zip(self._caches, shapes, parts, strict=True):
            first = self._group.rank // self._num_sharing * cache.shape[1]
            cache.index_copy_(0, rows, part.unflatten(1, shape)[:, first : first + cache.shape[1]])

    def _whole_shape(self, cache: torch.Tensor) -> tuple[int, int]:
        """Return a token's [num_kv_heads of all ranks, head_dim]."""
        return cache.shape[1] * self._group.size // self._num_sharing, cache.shape[2]


def follower_calls(runner: ModelRunner) -> dict[type, Callable[[Any], object]]:
    """Return what a follower does with rank 0's messages about KV; see `follow`."""
    kv = RankKV(runner)
    return {ReadKV: lambda message: kv.read(message.slots), WriteKV: lambda message: kv.write(message.slots)}


class EngineKV:
    """`KVBytes` of rank 0's engine and its followers."""

    def __init__(self, runner: ModelRunner, followers: Sequence[Connection] = ()) -> None:
        self._ranks, self._followers = RankKV(runner), followers
        self._block_size, self._states = runner.block_size, runner.states
        self._num_kv_bytes = self._ranks.num_bytes_per_token
        num_state_bytes = 0 if self._states is None else self._states.num_bytes_per_token
        self.num_bytes_per_token = self._num_kv_bytes + num_state_bytes
        self.fingerprint = kv_fingerprint(runner)

    def read(self, block_table: Sequence[int], start: int, stop: int) -> torch.Tensor:
        slots = slots_of(block_table, range(start, stop), self._block_size)
        self._tell(ReadKV(slots=slots))
        found = self._ranks.read(slots)
        if self._states is None:
            return found
        return torch.cat([found, self._states.read(block_table, start, stop).view(torch.uint8)], dim=1)

    def write(self, block_table: Sequence[int], start: int, stop: int, data: torch.Tensor) -> None:
        slots = slots_of(block_table, range(start, stop), self._block_size)
        self._tell(WriteKV(slots=slots))
        self._ranks.write(slots, data[:, : self._num_kv_bytes].contiguous())
        if self._states is not None:
            self._states.write(slots, data[:, self._num_kv_bytes :].contiguous().view(self._states.dtype))

    def _tell(self, message: ReadKV | WriteKV) -> None:
        if self._followers:
            payload = encode(message)
            for follower in self._followers:
                follower.send_bytes(payload)


def kv_fingerprint(runner: ModelRunner) -> str:
    """Return a hash of all that KV and states depend on, but for later updates of the weights.

    Two verifiers with the same one compute the same KV, whatever their numbers of ranks.
    """
    config = runner.config
    described = {name: value for name, value in runner.description.to_dict().items() if name not in _VOLATILE}
    taps = None if runner.states is None else (config.state_taps, str(runner.states.dtype))
    digest = runner.memory.recall(DIGEST)
    if digest is None:
        digest = checkpoint_digest(resolve_folder(config))
        runner.memory.remember(DIGEST, digest)
    parts = (runner.dtype, runner.kv_dtype, config.quantization, runner.block_size, taps, digest)
    text = json.dumps([described, *map(str, parts)], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def checkpoint_digest(folder: Path) -> str:
    """Return a hash of all bytes of a checkpoint's files; their names do not count. Reads about a gigabyte a second."""
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else [folder]
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()
