"""Paged attention over the KV pool: torch's implementation, and the hook into the library's modelling code.

The library's unchanged code runs a packed batch as one sequence of N tokens. Each attention layer calls `attend_paged`,
which uses the handler that the runner has entered for the step.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from outrider.verifier_service.gpu.transfers import upload_rows
from outrider.verifier_service.messages.batch import ScheduledBatch

IMPLEMENTATION_NAME = "outrider_paged"
MAX_SHORT_QUERY = 16  # sequences with queries up to this length share a padded call; longer prefill chunks run alone
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
MIN_PADDED_BLOCKS = 16  # block tables up to this width share a call; wider ones are grouped by powers of two


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """A layer's options beyond plain causal softmax attention."""

    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [num_heads] logits that enter the softmax without a value


class AttentionHandler(Protocol):
    """One step's attention: writes the packed tokens' keys and values to the pool, and attends."""

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_dim]
        value: torch.Tensor,  # [num_tokens, num_kv_heads, value_dim]
        options: AttentionOptions,
    ) -> torch.Tensor: ...  # [num_tokens, num_heads, value_dim]


# one per thread: two engines in one process (tests, a local drafter) must not see each other's step
_active_handler: ContextVar[AttentionHandler | None] = ContextVar("outrider_attention", default=None)


class entered:
    """Context in which attention layers of this thread use `handler`; asserts that none is active yet."""

    __slots__ = ("_handler", "_token")

    def __init__(self, handler: AttentionHandler) -> None:
        self._handler = handler

    def __enter__(self) -> None:
        assert _active_handler.get() is None, "attention contexts do not nest"
        self._token: Token[AttentionHandler | None] = _active_handler.set(self._handler)

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active_handler.reset(self._token)


def attend_paged(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the active handler; the signature is that of the library's attention interface."""
    handler = _active_handler.get()
    assert handler is not None, "attention ran outside of an attention context"
    options = AttentionOptions(scaling=scaling, sliding_window=sliding_window, softcap=softcap, sinks=s_aux)
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    absorbed = getattr(module, "absorbed", None)  # see `latent_attention`
    rows = packed(query) if absorbed is None else absorbed.query(packed(query))
    output = handler.attend(layer_idx, rows, packed(key), packed(value), options)
    return (output if absorbed is None else absorbed.output(output))[None], None


def packed(heads: torch.Tensor) -> torch.Tensor:
    """Return [num_tokens, num_heads, head_dim] from the library's [1, num_heads, num_tokens, head_dim]."""
    return heads[0].transpose(0, 1)


def register_attention() -> None:
    """Register `attend_paged` with the library, which builds no mask for an implementation without a mask function."""
    from transformers import AttentionInterface  # imported here: two seconds, which our own decoder does not need

    AttentionInterface.register(IMPLEMENTATION_NAME, attend_paged)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """The KV heads of one layer on this rank."""

    num_kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def num_elements(self) -> int:
        return self.num_kv_heads * (self.head_dim + self.value_dim)


@dataclass(slots=True)
class ShapeRecorder:
    """A handler that returns zeros and records the KV shape of each layer."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        assert layer_index not in self.shapes, f"layer {layer_index} attends twice"
        self.shapes[layer_index] = LayerShape(
            num_kv_heads=key.shape[1], head_dim=key.shape[2], value_dim=value.shape[2]
        )
        return query.new_zeros(*query.shape[:2], value.shape[2])


def fresh_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on a CPU in fresh pages, which take memory once they are written: most of a pool may never be."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def movable(cache: torch.Tensor) -> torch.Tensor:
    """Return a cache whose rows any device copies by index: FP8 as its bytes."""
    return cache.view(torch.uint8) if cache.dtype is torch.float8_e4m3fn else cache


class KVPool:
    """Keys and values of all layers, [num_blocks * block_size, num_kv_heads, head_dim] each, of dtype `stored`.

    FP8 (E4M3) has no scales: numbers are rounded to the nearest when they are written, beyond 448 to 448.
    """

    def __init__(
        self,
        shapes: dict[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        stored: torch.dtype | None = None,
    ) -> None:
        self.num_blocks, self.block_size, self.dtype, self.device = num_blocks, block_size, dtype, device
        self.stored = dtype if stored is None else stored  # as it is held; steps compute in `dtype`
        self.widest = max((shape.head_dim for shape in shapes.values()), default=0)
        num_slots = num_blocks * block_size
        # zeros, not empty: masked slots enter a product with weight 0, and 0 * NaN is NaN
        self.keys = {
            index: fresh_zeros(num_slots, shape.num_kv_heads, shape.head_dim, dtype=self.stored, device=device)
            for index, shape in shapes.items()
        }
        self.values = {
            index: fresh_zeros(num_slots, shape.num_kv_heads, shape.value_dim, dtype=self.stored, device=device)
            for index, shape in shapes.items()
        }
        self._scratch: dict[str, torch.Tensor] = {}

    def write(self, layer_index: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store keys and values [num_tokens, num_kv_heads, head_dim] of the tokens in slots [num_tokens]."""
        for cache, rows in ((self.keys[layer_index], key), (self.values[layer_index], value)):
            held = rows if self.stored is self.dtype else rows.clamp(-FP8_MAX, FP8_MAX).to(self.stored)
            movable(cache).index_copy_(0, slots, movable(held))

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the keys and values of single slots, in every layer; all are read before any is written."""
        if not sources:
            return
        source_ids, target_ids = upload_rows(sources, self.device), upload_rows(targets, self.device)
        for cache in map(movable, (*self.keys.values(), *self.values.values())):
            cache.index_copy_(0, target_ids, cache.index_select(0, source_ids))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks of keys and values, in every layer; all are read before any is written."""
        if not sources:
            return
        source_ids, target_ids = upload_rows(sources, self.device), upload_rows(targets, self.device)
        for cache in map(movable, (*self.keys.values(), *self.values.values())):
            blocks = cache.view(self.num_blocks, -1)
            blocks.index_copy_(0, target_ids, blocks.index_select(0, source_ids))

    def gather(
        self, layer_index: int, block_ids: torch.Tensor, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read whole blocks of keys and values: [num_sequences, num_kv_heads, context, head_dim] each.

        `block_ids` is [num_sequences * width]. The next call overwrites the results.
        """
        key = self._gather_one("key", self.keys[layer_index], block_ids, num_sequences)
        return key, self._gather_one("value", self.values[layer_index], block_ids, num_sequences)

    def _gather_one(self, role: str, cache: torch.Tensor, block_ids: torch.Tensor, num_sequences: int) -> torch.Tensor:
        _, num_heads, head_dim = cache.shape
        num_elements = block_ids.numel() * self.block_size * num_heads * head_dim
        scratch = self._scratch.get(role)
        if scratch is None or scratch.numel() < num_elements:
            # kept between steps: on a CPU the page faults of fresh memory cost several times the copy
            scratch = self._scratch[role] = torch.empty(num_elements, dtype=self.stored, device=self.device)
        rows = scratch[:num_elements].view(block_ids.numel(), -1)
        torch.index_select(movable(cache).view(self.num_blocks, -1), 0, block_ids, out=movable(rows))
        return rows.to(self.dtype).view(num_sequences, -1, num_heads, head_dim).transpose(1, 2)


@dataclass(slots=True, kw_only=True)
class QueryGroup:
    """Sequences that share one attention call, padded to the longest query and the longest block table."""

    num_sequences: int
    query_length: int
    token_index: torch.Tensor | None  # [num_sequences * query_length] into the packed tokens; None: all, in order
    block_ids: torch.Tensor  # [num_sequences * width]
    distance: torch.Tensor  # [num_sequences, query_length, context] query position - key position; < 0: masked
    fold_heads: bool  # query heads that share a KV head become query rows, so that keys and values are not copied
    _biases: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def bias(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask, 0 or -inf: [num_sequences, 1, query_length * repeats, context]."""
        cached = self._biases.get((window, repeats))
        if cached is None:
            allowed = self.distance >= 0
            if window is not None:
                allowed &= self.distance < window
            cached = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            cached.masked_fill_(~allowed, float("-inf"))
            if repeats > 1:
                cached = cached.repeat_interleave(repeats, dim=1)
            cached = self._biases[window, repeats] = cached[:, None]
        return cached


class AttentionContext:
    """One step's attention metadata, computed once and shared by all layers."""

    __slots__ = ("_groups", "_output_order", "_pool", "_slots")

    def __init__(
        self, pool: KVPool, slots: torch.Tensor, groups: list[QueryGroup], output_order: list[int] | None
    ) -> None:
        self._pool, self._slots, self._groups = pool, slots, groups
        self._output_order = None if output_order is None else torch.tensor(output_order, device=pool.device)

    @classmethod
    def of(cls, batch: ScheduledBatch, pool: KVPool) -> AttentionContext:
        """Build slots, gather indices and masks from a batch."""
        starts = starts_of(batch.query_lengths)
        members = group_members(batch)
        token_indices = [_padded_tokens(batch, indices, starts) for indices in members]
        order = _output_order(batch, members, starts)
        in_order = order is None and len(members) == 1
        groups = [
            _query_group(batch, indices, None if in_order else tokens, pool)
            for indices, tokens in zip(members, token_indices, strict=True)
        ]
        return cls(pool, torch.tensor(batch.slot_mapping, device=pool.device), groups, order)

    def attend(
        self, layer_index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write this step's keys and values, then attend."""
        self._pool.write(layer_index, self._slots, key, value)
        outputs = [self._attend_group(group, layer_index, query, options) for group in self._groups]
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if self._output_order is None else output.index_select(0, self._output_order)

    def _attend_group(
        self,
        group: QueryGroup,
        layer_index: int,
        packed: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Return [num_sequences * query_length, num_heads, value_dim]."""
        num_sequences, length = group.num_sequences, group.query_length
        query = packed if group.token_index is None else packed.index_select(0, group.token_index)
        key, value = self._pool.gather(layer_index, group.block_ids, num_sequences)
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        repeats = num_heads // num_kv_heads if group.fold_heads else 1
        # [num_sequences, num_heads / repeats, query_length * repeats, head_dim]
        query = query.reshape(num_sequences, length, num_heads // repeats, repeats, -1).transpose(1, 2).flatten(2, 3)
        bias = group.bias(options.sliding_window or None, repeats, query.dtype)
        output = _attend(query, key, value, bias, options, repeats)
        output = output.unflatten(2, (length, repeats)).transpose(1, 2)
        return output.reshape(num_sequences * length, num_heads, -1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    options: AttentionOptions,
    repeats: int,
) -> torch.Tensor:
    if options.softcap is None and options.sinks is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, scale=options.scaling, enable_gqa=grouped
        )
    return attend_by_hand(query, key, value, bias, options, repeats)


def attend_by_hand(
    query: torch.Tensor,  # [num_sequences, num_heads, num_rows, head_dim]
    key: torch.Tensor,  # [num_sequences, num_kv_heads, context, head_dim]
    value: torch.Tensor,  # [num_sequences, num_kv_heads, context, value_dim]
    bias: torch.Tensor,  # [num_sequences, 1, num_rows, context]
    options: AttentionOptions,
    repeats: int,
) -> torch.Tensor:
    """Attend in plain operations: for soft caps and sinks, which torch's fused attention lacks, and as its reference.

    `repeats` query heads are folded into the rows, and the sinks are folded alike.
    """
    copies = query.shape[1] // key.shape[1]
    if copies > 1:
        key, value = key.repeat_interleave(copies, dim=1), value.repeat_interleave(copies, dim=1)
    scaling = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
    scores = (query @ key.transpose(-1, -2)).float() * scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    scores = scores + bias
    if options.sinks is not None:
        sinks = options.sinks.float().view(query.shape[1], 1, repeats).expand(-1, query.shape[2] // repeats, -1)
        sinks = sinks.reshape(1, query.shape[1], -1, 1).expand(query.shape[0], -1, -1, -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.to(value.dtype) @ value


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Return where each sequence's tokens begin among the packed ones."""
    return list(accumulate(lengths, initial=0))[:-1]


def group_members(batch: ScheduledBatch) -> list[list[int]]:
    """Group sequences with short queries by context length; long prefill chunks run alone.

    A group's block tables are padded to the widest, so one long context would make all short ones read as much.
    """
    short: dict[int, list[int]] = {}
    members: list[list[int]] = []
    for index, length in enumerate(batch.query_lengths):
        if length > MAX_SHORT_QUERY:
            members.append([index])
        else:
            width = max(len(batch.block_tables[index]), MIN_PADDED_BLOCKS)
            short.setdefault((width - 1).bit_length(), []).append(index)
    return [*short.values(), *members]


def _padded_tokens(batch: ScheduledBatch, members: list[int], starts: list[int]) -> list[int]:
    """Return the packed tokens of each member, padded to the longest query by repeating its last token."""
    longest = max(batch.query_lengths[index] for index in members)
    tokens: list[int] = []
    for index in members:
        start, length = starts[index], batch.query_lengths[index]
        tokens += range(start, start + length)
        tokens += [start + length - 1] * (longest - length)
    return tokens


def _output_order(batch: ScheduledBatch, members: list[list[int]], starts: list[int]) -> list[int] | None:
    """Return the index of each packed token in the concatenated outputs of all groups; None if in order already."""
    order = [0] * batch.num_tokens
    base = 0
    for indices in members:
        longest = max(batch.query_lengths[index] for index in indices)
        for index in indices:
            start, length = starts[index], batch.query_lengths[index]
            order[start : start + length] = range(base, base + length)
            base += longest
    return None if base == batch.num_tokens and order == list(range(base)) else order


def _query_group(batch: ScheduledBatch, members: list[int], tokens: list[int] | None, pool: KVPool) -> QueryGroup:
    device = pool.device
    query_length = max(batch.query_lengths[index] for index in members)
    width = max(len(batch.block_tables[index]) for index in members)
    blocks: list[int] = []
    positions: list[list[int]] = []
    trees: list[tuple[int, int, int, list[list[int]]]] = []  # (member, first query, first key, distances)
    for member, index in enumerate(members):
        table, length, context = batch.block_tables[index], batch.query_lengths[index], batch.context_lengths[index]
        blocks += table
        blocks += [0] * (width - len(table))  # any block does: its positions are beyond every query
        ends = batch.tree_ends[index] if batch.tree_ends else ()
        distances = tree_distances(batch.tree_parents[index], ends) if batch.tree_parents else []
        first_key = context - len(distances)
        depths = [max(row) for row in distances]
        own = [*range(context - length, first_key), *(first_key + depth for depth in depths)]
        positions.append([*own, *[context - 1] * (query_length - length)])
        if distances:
            trees.append((member, length - len(distances), first_key, distances))
    query_positions = torch.tensor(positions, device=device)  # [num_sequences, query_length]
    key_positions = torch.arange(width * pool.block_size, device=device)
    distance = query_positions[:, :, None] - key_positions
    for member, first_query, first_key, distances in trees:
        rows = slice(first_query, first_query + len(distances))
        distance[member, rows, first_key : first_key + len(distances)] = torch.tensor(distances, device=device)
    return QueryGroup(
        num_sequences=len(members),
        query_length=query_length,
        token_index=None if tokens is None else torch.tensor(tokens, device=device),
        block_ids=torch.tensor(blocks, device=device),
        distance=distance,
        fold_heads=query_length <= MAX_SHORT_QUERY,
    )


def tree_distances(parents: Sequence[int], ends: Sequence[int] = ()) -> list[list[int]]:
    """Return, for each tree node, its distance from every ancestor: [num_nodes][num_nodes]; -1: not an ancestor.

    `ends`: see `ScheduledBatch.tree_ends`; the later nodes that a node sees are within every window: 0.
    """
    rows: list[list[int]] = []
    for index, parent in enumerate(parents):
        row = [-1] * len(parents) if parent < 0 else [steps + 1 if steps >= 0 else -1 for steps in rows[parent]]
        row[index] = 0
        rows.append(row)
    for index, end in enumerate(ends):
        rows[index][index + 1 : end] = [0] * (end - index - 1)
    return rows
