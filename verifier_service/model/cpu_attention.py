"""Attention on a CPU: our kernel reads keys and values in place; `AttentionContext` is its reference, in torch."""

from __future__ import annotations

import torch

from outrider.verifier_service.cpu.kernels import Attend, Kernels, load_kernels
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import (
    AttentionContext,
    AttentionOptions,
    KVPool,
    starts_of,
    tree_distances,
)


class CpuContext:
    """One step's attention handler on a CPU with kernels."""

    def __init__(self, batch: ScheduledBatch, pool: KVPool, kernels: Kernels) -> None:
        self._pool, self._kernel = pool, kernels.attend[pool.stored]
        width = max(map(len, batch.block_tables), default=0)
        numbers = {
            "firsts": starts_of(batch.query_lengths),
            "lengths": batch.query_lengths,
            "tables": [table + [0] * (width - len(table)) for table in batch.block_tables],
            **_sights(batch),
        }
        arrays = {name: torch.tensor(each, dtype=torch.int32) for name, each in numbers.items()}
        arrays["slots"] = torch.tensor(batch.slot_mapping, dtype=torch.int64)
        self._arrays = arrays  # kept alive: the arguments only have their addresses
        self._arguments = Attend(
            num_tokens=batch.num_tokens,
            num_sequences=len(batch.query_lengths),
            table_width=width,
            block_size=pool.block_size,
            num_threads=torch.get_num_threads(),
            **{name: array.data_ptr() for name, array in arrays.items()},
        )

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend."""
        keys, values = self._pool.keys[layer_index], self._pool.values[layer_index]
        query, key, value = _rows(query), _rows(key), _rows(value)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, value_dim = value.shape[1:]
        assert query.dtype == key.dtype == value.dtype == self._pool.dtype
        assert num_tokens == self._arguments.num_tokens
        output = query.new_empty(num_tokens, num_heads, value_dim)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        arguments = self._arguments
        arguments.query, arguments.key, arguments.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if self._pool.stored is not self._pool.dtype:  # the kernel reads FP8 and writes none
            self._pool.write(layer_index, self._arrays["slots"], key, value)
            arguments.key = arguments.value = None
        arguments.output = output.data_ptr()
        arguments.key_cache, arguments.value_cache = keys.data_ptr(), values.data_ptr()
        arguments.query_stride, arguments.key_stride = query.stride(0), key.stride(0)
        arguments.value_stride = value.stride(0)
        arguments.num_heads, arguments.num_kv_heads = num_heads, num_kv_heads
        arguments.head_dim, arguments.value_dim = head_dim, value_dim
        arguments.window = options.sliding_window or 0
        arguments.scale = head_dim**-0.5 if options.scaling is None else options.scaling
        arguments.softcap = options.softcap or 0.0
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        self._kernel(arguments)
        return output


def in_place_or_gathered(batch: ScheduledBatch, pool: KVPool) -> CpuContext | AttentionContext:
    """Return one step's attention: in place if the CPU's kernels are available, else over gathered blocks."""
    kernels = load_kernels(pool.dtype) if pool.device.type == "cpu" else None
    return AttentionContext.of(batch, pool) if kernels is None else CpuContext(batch, pool, kernels)


def _sights(batch: ScheduledBatch) -> dict[str, list[int]]:
    """Return which tokens each one sees, and its position if there are trees, as `attention.cpp` describes them."""
    prefixes: list[int] = []
    if not any(batch.tree_parents):
        for length, context in zip(batch.query_lengths, batch.context_lengths, strict=True):
            prefixes += range(context - length + 1, context + 1)
        return {"prefixes": prefixes}
    positions: list[int] = []
    seen: list[int] = []
    seen_starts = [0]
    ends = batch.tree_ends or [[]] * len(batch.tree_parents)
    trees = map(tree_distances, batch.tree_parents, ends)
    for length, context, distances in zip(batch.query_lengths, batch.context_lengths, trees, strict=True):
        first_node, first_token = context - len(distances), len(prefixes) + length - len(distances)
        chain = range(context - length, first_node)
        prefixes += range(context - length + 1, first_node + 1)
        prefixes += [first_node] * len(distances)
        positions += chain
        positions += [first_node + max(row) for row in distances]
        seen_starts += [len(seen)] * len(chain)
        for row in distances:
            seen += [first_token + node for node, distance in enumerate(row) if distance >= 0]
            seen_starts.append(len(seen))
    return {"prefixes": prefixes, "positions": positions, "seen_starts": seen_starts, "seen": seen}


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """Return [num_tokens, num_heads, head_dim] with a token's heads contiguous; the token stride may be larger."""
    _, _, head_dim = heads.shape
    return heads if heads.stride(2) == 1 and heads.stride(1) == head_dim else heads.contiguous()
