"""A decoder's layers on a CPU, in one call each for few rows: `cpu/layer.cpp`; and their attention alone.

Our kernel reads keys and values in place; `AttentionContext` is its reference, in torch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from outrider.verifier_service.cpu import kernels as cpu
from outrider.verifier_service.cpu.kernels import Attend, Kernels, load_kernels
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import (
    AttentionContext,
    AttentionHandler,
    AttentionOptions,
    KVPool,
    starts_of,
    tree_distances,
)
from outrider.verifier_service.model.decoder import Attention, DecoderLayer, GatedMLP, HeadNorm, Norm, Turn
from outrider.verifier_service.model.packed_linear import PanelLinear

MAX_ROWS = 128  # with more, Python between the kernels takes little, and they would need much memory


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
        for name, setting in _settings(options, head_dim).items():
            setattr(arguments, name, setting)
        arguments.sinks = None if sinks is None else sinks.data_ptr()
        self._kernel(arguments)
        return output

    def of_layer(self, layer_index: int, hidden: torch.Tensor) -> Attend | None:
        """Return the arguments for a layer's caches, for a kernel to fill in the rest; None: the caches are FP8.

        The kernel reads FP8 and writes none.
        """
        if self._pool.stored is not self._pool.dtype:
            return None
        assert hidden.dtype is self._pool.dtype  # the kernel gets addresses only
        assert len(hidden) == self._arguments.num_tokens
        caches = self._pool.keys[layer_index], self._pool.values[layer_index]
        self._arguments.key_cache, self._arguments.value_cache = (cache.data_ptr() for cache in caches)
        return self._arguments


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


class WholeLayer:
    """Computes what a `DecoderLayer` does, to the bit; see `whole_layer`."""

    def __init__(self, layer: DecoderLayer, kernels: Kernels, dtype: torch.dtype) -> None:
        attention, mlp, options = layer.attention, layer.mlp, layer.attention.options
        assert isinstance(mlp, GatedMLP)
        linears = {"qkv": attention.qkv, "output": attention.output, "gate_up": mlp.gate_up, "down": mlp.down}
        norms = {
            "before_attention": layer.before_attention,
            "after_attention": layer.after_attention,
            "before_mlp": layer.before_mlp,
            "after_mlp": layer.after_mlp,
            "heads": attention.norm,
        }
        self._sinks = None if options.sinks is None else options.sinks.float().contiguous()
        self._kept = linears, norms  # the addresses below are theirs
        self._layer = cpu.Layer(
            **{name: cast(PanelLinear, linear).product() for name, linear in linears.items()},
            **{name: _norm(norm) for name, norm in norms.items()},
            **kernels.addresses(mlp.activation, dtype),
            num_kv_heads=attention.shape.num_kv_heads,
            head_dim=attention.shape.head_dim,
            **_settings(options, attention.shape.head_dim),
            sinks=None if self._sinks is None else self._sinks.data_ptr(),
        )
        self._run, self._index, self._dtype = kernels.layer, attention.layer_index, dtype

    def __call__(self, hidden: torch.Tensor, turn: Turn | None, attend: AttentionHandler) -> torch.Tensor | None:
        """Map [num_tokens, hidden_size] to the same shape; None: this step wants the layer's parts."""
        if hidden.shape[0] > MAX_ROWS or hidden.dtype is not self._dtype or not isinstance(attend, CpuContext):
            return None
        arguments = attend.of_layer(self._index, hidden)
        if arguments is None or hidden.requires_grad or not hidden.is_contiguous():
            return None
        output = torch.empty_like(hidden)
        cosines, sines = (None, None) if turn is None else (part.data_ptr() for part in turn)
        self._run(self._layer, arguments, hidden.data_ptr(), cosines, sines, output.data_ptr())
        return output


def whole_layer(layer: DecoderLayer, dtype: torch.dtype) -> WholeLayer | None:
    """Return a layer in one call; None: it has parts that `cpu/layer.cpp` does not know, or there is no compiler."""
    attention, mlp = layer.attention, layer.mlp
    if type(attention) is not Attention or type(mlp) is not GatedMLP or layer.scale != 1.0:
        return None
    linears = (attention.qkv, attention.output, mlp.gate_up, mlp.down)
    norms = (layer.before_attention, layer.after_attention, layer.before_mlp, layer.after_mlp)
    is_known = (
        all(isinstance(linear, PanelLinear) for linear in linears)
        and all(isinstance(norm, Norm | nn.Identity) for norm in norms)
        and (attention.norm is None or isinstance(attention.norm, HeadNorm))
        and attention.shape.head_dim == attention.shape.value_dim
        and attention.group.size == 1
    )
    kernels = load_kernels(dtype) if is_known else None  # not on a GPU: compiling takes a while
    return None if kernels is None or mlp.activation not in kernels.activations else WholeLayer(layer, kernels, dtype)


def _norm(norm: nn.Module | None) -> cpu.Norm:
    return cpu.Norm(norm.wide.data_ptr(), norm.eps) if isinstance(norm, Norm | HeadNorm) else cpu.Norm()


def _settings(options: AttentionOptions, head_dim: int) -> dict[str, Any]:
    """Return a layer's options by the names of the kernels' fields, but for sinks, which somebody has to keep."""
    scale = head_dim**-0.5 if options.scaling is None else options.scaling
    return {"window": options.sliding_window or 0, "scale": scale, "softcap": options.softcap or 0.0}
