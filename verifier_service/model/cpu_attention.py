"""Attention on a CPU: our kernel reads a chain's keys and values in place; for trees, torch reads gathered copies.

decode, verification, prefill  ->  cpu/attention.cpp
trees                          ->  AttentionContext, also the reference for the kernel
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from outrider.verifier_service.cpu.kernels import Attend, Kernels, load_kernels
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import (
    AttentionContext,
    AttentionOptions,
    KVPool,
    starts_of,
)


@dataclass(frozen=True, slots=True)
class Rest:
    """The sequences with trees, for torch."""

    tokens: torch.Tensor  # int64 [num_rest] indices of packed tokens
    context: AttentionContext


class CpuContext:
    """One step's attention handler on a CPU with kernels."""

    def __init__(self, batch: ScheduledBatch, pool: KVPool, kernels: Kernels) -> None:
        self._pool, self._kernel = pool, kernels.attend
        starts = starts_of(batch.query_lengths)
        indices = range(len(batch.query_lengths))
        own = [i for i in indices if _is_chain(batch, i)]
        width = max((len(batch.block_tables[i]) for i in own), default=0)
        numbers = {
            "firsts": [starts[i] for i in own],
            "lengths": [batch.query_lengths[i] for i in own],
            "contexts": [batch.context_lengths[i] for i in own],
            "tables": [batch.block_tables[i] + [0] * (width - len(batch.block_tables[i])) for i in own],
        }
        arrays = {name: torch.tensor(each, dtype=torch.int32) for name, each in numbers.items()}
        arrays["slots"] = torch.tensor(batch.slot_mapping, dtype=torch.int64)
        self._arrays = arrays  # kept alive: the arguments only have their addresses
        self._arguments = Attend(
            num_tokens=batch.num_tokens,
            num_sequences=len(own),
            table_width=width,
            block_size=pool.block_size,
            num_threads=torch.get_num_threads(),
            **{name: array.data_ptr() for name, array in arrays.items()},
        )
        rest = [i for i in indices if not _is_chain(batch, i)]
        self._rest = _rest(batch, rest, starts, pool) if rest else None

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend."""
        keys, values = self._pool.keys[layer_index], self._pool.values[layer_index]
        query, key, value = _rows(query), _rows(key), _rows(value)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads, value_dim = value.shape[1:]
        assert query.dtype == key.dtype == value.dtype == keys.dtype
        assert num_tokens == self._arguments.num_tokens
        output = query.new_empty(num_tokens, num_heads, value_dim)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        arguments = self._arguments
        arguments.query, arguments.key, arguments.value = query.data_ptr(), key.data_ptr(), value.data_ptr()
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
        if self._rest is not None:
            tokens = self._rest.tokens
            attended = self._rest.context.attend(layer_index, query[tokens], key[tokens], value[tokens], options)
            output.index_copy_(0, tokens, attended)
        return output


def in_place_or_gathered(batch: ScheduledBatch, pool: KVPool) -> CpuContext | AttentionContext:
    """Return one step's attention: in place if the CPU's kernels are available, else over gathered blocks."""
    kernels = load_kernels(pool.dtype) if pool.device.type == "cpu" else None
    return AttentionContext.of(batch, pool) if kernels is None else CpuContext(batch, pool, kernels)


def _is_chain(batch: ScheduledBatch, index: int) -> bool:
    return not batch.tree_parents or not batch.tree_parents[index]


def _rest(batch: ScheduledBatch, members: list[int], starts: list[int], pool: KVPool) -> Rest:
    tokens = [starts[i] + offset for i in members for offset in range(batch.query_lengths[i])]
    part = dataclasses.replace(
        batch,
        token_ids=[batch.token_ids[token] for token in tokens],
        positions=[batch.positions[token] for token in tokens],
        slot_mapping=[batch.slot_mapping[token] for token in tokens],
        query_lengths=[batch.query_lengths[i] for i in members],
        context_lengths=[batch.context_lengths[i] for i in members],
        block_tables=[batch.block_tables[i] for i in members],
        tree_parents=[batch.tree_parents[i] for i in members] if batch.tree_parents else [],
        tree_ends=[batch.tree_ends[i] for i in members] if batch.tree_ends else [],
        logits_indices=[],
    )
    return Rest(torch.tensor(tokens), AttentionContext.of(part, pool))


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """Return [num_tokens, num_heads, head_dim] with a token's heads contiguous; the token stride may be larger."""
    _, _, head_dim = heads.shape
    return heads if heads.stride(2) == 1 and heads.stride(1) == head_dim else heads.contiguous()
