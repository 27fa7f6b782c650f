"""The Triton kernels of `triton_attention` and their helpers.

Parameters in capitals are compile-time constants: model sizes and flags. Values that change between steps are run-time
arguments. Scores are float32 in powers of two: `inner_scale` and `outer_scale` include log2 e.
"""

from __future__ import annotations

from outrider.verifier_service.gpu.language import jit, tl


@jit
def _find_tile(tile: tl.tensor, query_starts: tl.tensor, num_sequences: tl.tensor, TOKENS: tl.constexpr) -> tl.tensor:
    """Return the sequence of a tile, and that sequence's first tile.

    Sequence s has the tiles from starts[s] // TOKENS + s on: as many as it needs or one more, without a list of tiles.
    A binary search finds the last sequence whose tiles start at or before this one.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(query_starts + middle) // TOKENS + middle <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low, tl.load(query_starts + low) // TOKENS + low


@jit
def _seen_in_tree(
    row_words: tl.tensor, is_tree_row: tl.tensor, first: tl.tensor, tree_start: tl.tensor, num_words: tl.tensor,
    KEYS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return which of the keys from `first` on a query of the tree sees there: [ROWS, KEYS].

    KEYS is at most 64, so the bits are in two words of a query's mask, which are loaded and shifted into one. Keys
    before the tree have no bits; if `first` is before the tree, the bits begin at the tree's first key.
    """
    offset = tl.maximum(first - tree_start, 0)
    word, shift = offset // 64, (offset % 64).to(tl.uint64)
    low = tl.load(row_words + word, mask=is_tree_row, other=0).to(tl.uint64, bitcast=True)
    has_next = is_tree_row & (word + 1 < num_words)
    high = tl.load(row_words + word + 1, mask=has_next, other=0).to(tl.uint64, bitcast=True)
    bits = (low >> shift) | ((high << 1) << (63 - shift))  # [ROWS]; in two shifts: a shift by 64 is undefined
    bit = tl.maximum(first + tl.arange(0, KEYS) - tl.maximum(first, tree_start), 0)
    return ((bits[:, None] >> bit.to(tl.uint64)[None, :]) & 1) != 0


@jit
def _visible(
    rows: tl.tensor, row_positions: tl.tensor, row_words: tl.tensor, first: tl.tensor, end: tl.tensor,
    tree_start: tl.tensor, own_positions: tl.tensor, num_words: tl.tensor, window: tl.tensor, KEYS: tl.constexpr,
    HAS_TREES: tl.constexpr, HAS_WINDOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return which of the keys from `first` on each query sees: [ROWS, KEYS]. `rows`: indices of the queries."""
    keys = first + tl.arange(0, KEYS)
    visible = keys[None, :] <= rows[:, None]
    key_positions = keys
    if HAS_TREES:
        in_tree = keys >= tree_start
        is_tree_row = rows >= tree_start
        seen = _seen_in_tree(row_words, is_tree_row, first, tree_start, num_words, KEYS)
        # the bits alone decide within the tree: masks see later ones of their block, too
        visible = tl.where(is_tree_row[:, None] & in_tree[None, :], seen, visible)
        if HAS_WINDOW:
            own = tl.load(own_positions + keys, mask=in_tree & (keys < end), other=0)
            key_positions = tl.where(in_tree, own, keys)
    if HAS_WINDOW:
        visible = visible & (row_positions[:, None] - key_positions[None, :] < window)
    return visible


@jit
def _attend_keys(
    sums: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor, begin: tl.tensor, end: tl.tensor, query: tl.tensor,
    key_base: tl.tensor, value_base: tl.tensor, key_stride: tl.tensor, value_stride: tl.tensor, table: tl.tensor,
    inner_scale: tl.tensor, outer_scale: tl.tensor, rows: tl.tensor, row_positions: tl.tensor, row_words: tl.tensor,
    tree_start: tl.tensor, own_positions: tl.tensor, num_words: tl.tensor, window: tl.tensor, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TREES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the keys from `begin` to `end` to a tile's running sums. Without `IS_MASKED`, all queries see all of them."""
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    for first in range(begin, end, KEYS):
        keys = first + tl.arange(0, KEYS)
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=keys < end, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        key = tl.load(  # [BLOCK_D, KEYS]
            key_base + dims[:, None] + (slots * key_stride)[None, :],
            mask=(dims < HEAD_DIM)[:, None] & (keys < end)[None, :],
            other=0.0,
        ).to(query.dtype)
        scores = tl.dot(query, key, input_precision="tf32x3") * inner_scale  # [ROWS, KEYS]
        if HAS_SOFTCAP:
            scores = (1.0 - 2.0 / (1.0 + tl.exp(2.0 * scores))) * outer_scale  # tanh; correct also for an infinite exp
        if IS_MASKED:
            visible = _visible(
                rows, row_positions, row_words, first, end, tree_start, own_positions, num_words, window,
                KEYS, HAS_TREES, HAS_WINDOW,
            )  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))
        elif HAS_WINDOW:
            scores = tl.where(row_positions[:, None] - keys[None, :] < window, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)  # if no key was visible yet: -inf - -inf is NaN
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(row_max - base)
        row_max = new_max
        row_sum = row_sum * decay + tl.sum(weights, 1)
        value = tl.load(  # [KEYS, BLOCK_V]
            value_base + value_dims[None, :] + (slots * value_stride)[:, None],
            mask=(value_dims < VALUE_DIM)[None, :] & (keys < end)[:, None],
            other=0.0,
        ).to(query.dtype)
        sums = tl.dot(weights.to(value.dtype), value, sums * decay[:, None], input_precision="tf32x3")
    return sums, row_max, row_sum


@jit
def _key_range(
    first: tl.tensor, last: tl.tensor, tree_start: tl.tensor, context_length: tl.tensor, window: tl.tensor,
    split: tl.tensor, num_splits: tl.tensor, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the begin of this split's keys, the first key that needs a mask, and the end.

    `first` and `last`: indices of the tile's first and last query. The splits together cover all keys that any query of
    the tile sees. All queries see the keys up to `first`, but for those in the tree. A query of the tree may see later
    ones.
    """
    begin = tl.minimum(first, 0)
    if HAS_WINDOW:
        begin = tl.maximum(tl.minimum(first, tree_start) - window + 1, 0) // KEYS * KEYS
    end = tl.where(last >= tree_start, context_length, last + 1)
    share = tl.cdiv(tl.cdiv(end - begin, KEYS), num_splits) * KEYS
    begin += split * share
    end = tl.minimum(end, begin + share)
    num_unmasked = tl.maximum(tl.minimum(tl.minimum(first + 1, tree_start), end) - begin, 0) // KEYS * KEYS
    return begin, begin + num_unmasked, end


@jit
def _load_queries(query_base: tl.tensor, is_row: tl.tensor, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr) -> tl.tensor:
    """Return the tile's queries [ROWS, BLOCK_D], padded with 0."""
    dims = tl.arange(0, BLOCK_D)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    return tl.load(query_base[:, None] + dims[None, :], mask=mask, other=0.0)


@jit
def attention_kernel(
    output: tl.tensor, log_weights: tl.tensor, query: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor,
    sinks: tl.tensor, query_starts: tl.tensor, context_lengths: tl.tensor, block_tables: tl.tensor,
    tree_sizes: tl.tensor, positions: tl.tensor, ancestors: tl.tensor, num_sequences: tl.tensor,
    table_width: tl.tensor, num_words: tl.tensor, window: tl.tensor, num_splits: tl.tensor, inner_scale: tl.tensor,
    outer_scale: tl.tensor, query_stride: tl.tensor, query_head_stride: tl.tensor, key_stride: tl.tensor,
    key_head_stride: tl.tensor, value_stride: tl.tensor, value_head_stride: tl.tensor, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_TREES: tl.constexpr, IS_SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Attend for one tile of queries, one KV head and one split of the keys."""
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first_tile = _find_tile(tile, query_starts, num_sequences, TOKENS)
    query_start = tl.load(query_starts + sequence)
    query_length = tl.load(query_starts + sequence + 1) - query_start
    first_token = (tile - first_tile) * TOKENS
    if first_token >= query_length:
        return
    context_length = tl.load(context_lengths + sequence)
    first_query = context_length - query_length  # index of the sequence's first query
    row = tl.arange(0, ROWS)
    token = first_token + row // GROUP
    is_row = (row < TOKENS * GROUP) & (token < query_length)
    packed = (query_start + token).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    rows = tl.where(is_row, first_query + token, -1)
    # without trees, these are dummies and not read
    tree_start, row_positions, row_words, own_positions = context_length, rows, packed, query_starts
    if HAS_TREES:
        tree_start = context_length - tl.load(tree_sizes + sequence)
        row_positions = tl.load(positions + packed, mask=is_row, other=0)
        row_words = ancestors + packed * num_words
        own_positions = positions + query_start - first_query
    query_base = query + packed * query_stride + head * query_head_stride
    query_tile = _load_queries(query_base, is_row, HEAD_DIM, BLOCK_D)
    last = first_query + tl.minimum(first_token + TOKENS, query_length) - 1
    begin, masked_begin, end = _key_range(
        first_query + first_token, last, tree_start, context_length, window, split, num_splits, KEYS, HAS_WINDOW
    )
    sums = tl.full([ROWS, BLOCK_V], 0.0, tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    row_sum = tl.full([ROWS], 0.0, tl.float32)
    if HAS_SINKS:  # a sink is a key without a value; only the first split adds it
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        row_max = tl.where(split == 0, sink, row_max)
        row_sum = tl.where(split == 0, 1.0, row_sum)
    key_base, value_base = key_cache + kv_head * key_head_stride, value_cache + kv_head * value_head_stride
    table = block_tables + sequence.to(tl.int64) * table_width
    for IS_MASKED in tl.static_range(2):
        sums, row_max, row_sum = _attend_keys(
            sums, row_max, row_sum, masked_begin if IS_MASKED else begin, end if IS_MASKED else masked_begin,
            query_tile, key_base, value_base, key_stride, value_stride, table, inner_scale, outer_scale,
            rows, row_positions, row_words, tree_start, own_positions, num_words, window,
            HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_V, BLOCK_SIZE, KEYS, HAS_SOFTCAP, HAS_TREES, HAS_WINDOW, IS_MASKED,
        )  # fmt: skip
    _store(
        output, log_weights, sums, row_max, row_sum, packed * tl.num_programs(1) * GROUP + head, is_row, split,
        num_splits, VALUE_DIM, BLOCK_V, IS_SPLIT,
    )  # fmt: skip


@jit
def _store(
    output: tl.tensor, log_weights: tl.tensor, sums: tl.tensor, row_max: tl.tensor, row_sum: tl.tensor,
    row_index: tl.tensor, is_row: tl.tensor, split: tl.tensor, num_splits: tl.tensor, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, IS_SPLIT: tl.constexpr,
) -> None:  # fmt: skip
    """Write a tile's outputs; with splits, also the log2 of each output's weight for `join_kernel`."""
    if IS_SPLIT:
        row_index = row_index * num_splits + split
        tl.store(log_weights + row_index, row_max + tl.log2(row_sum), mask=is_row)
    sums = sums / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]  # a split without visible keys has weight 0
    value_dims = tl.arange(0, BLOCK_V)
    tl.store(
        output + (row_index * VALUE_DIM)[:, None] + value_dims[None, :],
        sums.to(output.dtype.element_ty),
        mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :],
    )


@jit
def join_kernel(
    output: tl.tensor, parts: tl.tensor, log_weights: tl.tensor, num_splits: tl.tensor, VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr, AT_ONCE: tl.constexpr,
) -> None:  # fmt: skip
    """Average the splits' outputs of one token and head, weighted."""
    index = tl.program_id(0).to(tl.int64)
    value_dims = tl.arange(0, BLOCK_V)
    sums = tl.full([BLOCK_V], 0.0, tl.float32)
    total = 0.0
    maximum = float("-inf")
    for first in range(0, num_splits, AT_ONCE):
        splits = first + tl.arange(0, AT_ONCE)
        is_split = splits < num_splits
        logs = tl.load(log_weights + index * num_splits + splits, mask=is_split, other=float("-inf"))
        part = tl.load(  # [AT_ONCE, BLOCK_V]
            parts + ((index * num_splits + splits) * VALUE_DIM)[:, None] + value_dims[None, :],
            mask=is_split[:, None] & (value_dims < VALUE_DIM)[None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(logs, 0))
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        decay = tl.exp2(maximum - base)
        weights = tl.exp2(logs - base)
        sums = sums * decay + tl.sum(part * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        maximum = new_maximum
    tl.store(
        output + index * VALUE_DIM + value_dims, (sums / total).to(output.dtype.element_ty), mask=value_dims < VALUE_DIM
    )
