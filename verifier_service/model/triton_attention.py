"""Paged attention on a CUDA device: one Triton kernel over block tables for prefill, decode, chains and trees.

Keys and values are read in place from the KV pool. A program takes a tile of queries (tokens times the query heads
that share a KV head) and reads the keys once, with the online softmax of FlashAttention (Dao et al., 2022,
arXiv:2205.14135), in powers of two and float32. If too few programs would leave multiprocessors idle (few queries,
long contexts), the keys are split among programs and a second kernel joins their parts (Flash-Decoding, Dao et al.,
2023).

    tokens of a sequence   0 ............ context - query ....... context - tree ...... context
    seen by                |  all queries |  queries after it     |  descendants, by bit mask

The reference is `attention.AttentionContext`. `TRITON_INTERPRET=1` runs the kernels without a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from outrider.verifier_service.gpu.attention_kernels import attention_kernel, join_kernel
from outrider.verifier_service.gpu.language import triton
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import AttentionOptions, KVPool
from outrider.verifier_service.model.paged_metadata import PagedMetadata

MIN_DOT = 16  # the smallest side of a matrix product on tensor cores
TILE_ROWS = (16, 64, 128)  # decode, verification, prefill; few sizes, since each one is compiled
LONG_QUERY_ROWS = 512  # from here on, the largest tile is fastest
MAX_TILE_KEYS = 64
STAGE_BYTES = 32 << 10  # keys and values that a tile loads at a time; an H100 has 227 KiB of shared memory …
QUERY_BYTES = 64 << 10  # … also for the tile's queries and outputs
FOUR_WARPS_BYTES = 64 * 128 * 2  # largest output of a tile that fits the registers of four warps
MIN_SPLIT_KEYS = 256  # shorter parts cost more to join than they gain
MAX_SPLITS = 128
JOINED_AT_ONCE = 16
PROGRAMS_PER_MULTIPROCESSOR = 2
LOG2_E = math.log2(math.e)


def require_triton() -> None:
    """Raise `RuntimeError` without Triton: CUDA builds of torch include it, others need `pip install triton`."""
    if triton is None:
        raise RuntimeError("attention on a CUDA device needs the package triton, which is not installed")


class TritonContext:
    """One step's attention handler on a CUDA device, as `AttentionContext` elsewhere."""

    __slots__ = ("_metadata", "_pool")

    def __init__(self, metadata: PagedMetadata, pool: KVPool) -> None:
        self._metadata, self._pool = metadata, pool

    @classmethod
    def of(cls, batch: ScheduledBatch, pool: KVPool) -> TritonContext:
        """Build slots, tables and masks from a batch."""
        return cls(PagedMetadata.of(batch, pool.block_size, pool.device), pool)

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend."""
        self._pool.write(layer_index, self._metadata.slot_mapping, key, value)
        keys, values = self._pool.keys[layer_index], self._pool.values[layer_index]
        return paged_attention(query, keys, values, self._metadata, options)


def paged_attention(
    query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    key_cache: torch.Tensor,  # [num_slots, num_kv_heads, head_dim]
    value_cache: torch.Tensor,  # [num_slots, num_kv_heads, value_dim]
    metadata: PagedMetadata,
    options: AttentionOptions,
    *,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attend to keys and values in the pool, this step's included; return [num_tokens, num_heads, value_dim].

    All three tensors have a contiguous last dimension; both caches the query's dtype, or FP8 (E4M3). `num_splits`
    programs share the keys of a query; None: as many as fill the device. Does not synchronise.
    """
    require_triton()
    num_tokens, num_heads, head_dim = query.shape
    _, num_kv_heads, value_dim = value_cache.shape
    assert key_cache.dtype == value_cache.dtype
    assert key_cache.dtype in (query.dtype, torch.float8_e4m3fn)
    assert query.stride(2) == key_cache.stride(2) == value_cache.stride(2) == 1
    assert num_tokens == metadata.num_tokens
    assert num_heads % num_kv_heads == 0
    window = options.sliding_window or None
    tile = tile_of(metadata.max_query_length, num_heads // num_kv_heads, head_dim, value_dim, query.element_size())
    num_tiles = num_tokens // tile.num_tokens + metadata.num_sequences  # `_find_tile` says why
    if num_splits is None:
        reach = metadata.max_context_length
        reach = reach if window is None else min(reach, window + metadata.max_query_length)
        num_programs = (num_tiles - metadata.num_idle) * num_kv_heads
        num_splits = choose_num_splits(num_programs, reach, _num_multiprocessors(query.device))
    output = query.new_empty(num_tokens, num_heads, value_dim)
    with torch.cuda.device_of(query):  # Triton launches on the thread's own device, which need not be the tensors'
        if num_splits == 1:
            _launch(output, None, query, key_cache, value_cache, metadata, options, tile, num_tiles, 1)
            return output
        parts = query.new_empty(num_tokens, num_heads, num_splits, value_dim, dtype=torch.float32)
        weights = query.new_empty(num_tokens, num_heads, num_splits, dtype=torch.float32)
        _launch(parts, weights, query, key_cache, value_cache, metadata, options, tile, num_tiles, num_splits)
        join_kernel[(num_tokens * num_heads,)](
            output, parts, weights, num_splits, VALUE_DIM=value_dim, BLOCK_V=_padded(value_dim), AT_ONCE=JOINED_AT_ONCE
        )
    return output


def _launch(
    output: torch.Tensor,  # [num_tokens, num_heads, value_dim], or [num_tokens, num_heads, num_splits, value_dim]
    weights: torch.Tensor | None,  # [num_tokens, num_heads, num_splits]
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: PagedMetadata,
    options: AttentionOptions,
    tile: Tile,
    num_tiles: int,
    num_splits: int,
) -> None:
    head_dim, (_, num_kv_heads, value_dim) = query.shape[2], value_cache.shape
    scaling = head_dim**-0.5 if options.scaling is None else options.scaling
    softcap = options.softcap
    ancestors = metadata.ancestors
    attention_kernel[(num_tiles, num_kv_heads, num_splits)](
        *(output, weights, query, key_cache, value_cache, options.sinks),
        *(metadata.query_starts, metadata.context_lengths, metadata.block_tables),
        *(metadata.tree_sizes, metadata.positions, ancestors),
        metadata.num_sequences,
        metadata.block_tables.shape[1],
        0 if ancestors is None else ancestors.shape[1],
        options.sliding_window or 0,
        num_splits,
        # inner and outer scale: scores in powers of two; a soft cap is cap * tanh(scores / cap)
        scaling * LOG2_E if softcap is None else scaling / softcap,
        1.0 if softcap is None else softcap * LOG2_E,
        *(*query.stride()[:2], *key_cache.stride()[:2], *value_cache.stride()[:2]),
        GROUP=query.shape[1] // num_kv_heads,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=_padded(head_dim),
        BLOCK_V=_padded(value_dim),
        BLOCK_SIZE=metadata.block_size,
        TOKENS=tile.num_tokens,
        ROWS=tile.num_rows,
        KEYS=tile.num_keys,
        HAS_WINDOW=bool(options.sliding_window),
        HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=options.sinks is not None,
        HAS_TREES=ancestors is not None,
        IS_SPLIT=weights is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A program's share of queries and keys, and its compile options."""

    num_tokens: int
    num_rows: int  # tokens * query heads per KV head, padded
    num_keys: int
    num_warps: int
    num_stages: int


def tile_of(max_query_length: int, group_size: int, head_dim: int, value_dim: int, element_bytes: int) -> Tile:
    """Choose a tile for the step's longest query; `group_size` query heads share a KV head."""
    num_wanted = max_query_length * group_size
    decode, verification, prefill = TILE_ROWS
    num_rows = decode if num_wanted <= decode else verification if num_wanted < LONG_QUERY_ROWS else prefill
    padded_bytes = (_padded(head_dim) + _padded(value_dim)) * element_bytes
    while num_rows > decode and num_rows * padded_bytes > QUERY_BYTES:
        num_rows //= 2
    num_rows = max(num_rows, 1 << (group_size - 1).bit_length())
    num_keys = MAX_TILE_KEYS
    while num_keys > MIN_DOT and num_keys * padded_bytes > STAGE_BYTES:
        num_keys //= 2
    return Tile(
        num_tokens=num_rows // group_size,
        num_rows=num_rows,
        num_keys=num_keys,
        num_warps=4 if num_rows * _padded(value_dim) * element_bytes <= FOUR_WARPS_BYTES else 8,
        num_stages=3,
    )


def choose_num_splits(num_programs: int, num_keys: int, num_multiprocessors: int) -> int:
    """Return how many programs share `num_keys` keys: enough to fill the device, at least MIN_SPLIT_KEYS each."""
    wanted = num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // num_programs
    return max(1, min(wanted, num_keys // MIN_SPLIT_KEYS, MAX_SPLITS))


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _padded(dim: int) -> int:
    return max(MIN_DOT, 1 << (dim - 1).bit_length())
