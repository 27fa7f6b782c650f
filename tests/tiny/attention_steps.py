"""Steps of attention over scattered blocks, and a slow reference that knows nothing of blocks, groups or padding."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import (
    AttentionContext,
    AttentionHandler,
    AttentionOptions,
    KVPool,
    LayerShape,
)

NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM, VALUE_DIM = 40, 4, 8, 6
SHAPE = LayerShape(num_kv_heads=2, head_dim=HEAD_DIM, value_dim=VALUE_DIM)
NUM_HEADS = 6


def make_pool() -> KVPool:
    pool = KVPool(
        {0: SHAPE}, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu")
    )
    pool.keys[0].normal_(generator=torch.Generator().manual_seed(9))  # other requests' leavings
    pool.values[0].normal_(generator=torch.Generator().manual_seed(8))
    return pool


def reference(query, keys, values, options: AttentionOptions) -> torch.Tensor:
    """One sequence, a head and a query at a time: query [length, heads, d], keys and values [context, kv_heads, d]."""
    length, num_heads, _ = query.shape
    context = keys.shape[0]
    scaling = HEAD_DIM**-0.5 if options.scaling is None else options.scaling
    output = torch.empty(length, num_heads, values.shape[2])
    for row in range(length):
        last = context - length + row
        first = 0 if options.sliding_window is None else max(0, last - options.sliding_window + 1)
        for head in range(num_heads):
            kv_head = head * keys.shape[1] // num_heads
            scores = keys[first : last + 1, kv_head] @ query[row, head] * scaling
            if options.softcap is not None:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            weights = scores.exp()
            sink = 0.0 if options.sinks is None else options.sinks[head].exp()
            output[row, head] = weights @ values[first : last + 1, kv_head] / (weights.sum() + sink)
    return output


def gathered(batch: ScheduledBatch, pool: KVPool) -> AttentionHandler:
    return AttentionContext.of(batch, pool)


def run_both(
    pool: KVPool, spans: list[tuple[int, int]], options: AttentionOptions, seed: int = 0, handler=gathered
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend for sequences of (query_length, context_length) over scattered blocks: (paged, reference)."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    tables, slots, expected, queries, new_keys, new_values = [], [], [], [], [], []
    for length, context in spans:
        table = [blocks.pop() for _ in range(-(-context // BLOCK_SIZE))]
        own = torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(context)])
        query = torch.randn(length, NUM_HEADS, HEAD_DIM, generator=generator)
        keys = torch.randn(context, 2, HEAD_DIM, generator=generator)
        values = torch.randn(context, 2, VALUE_DIM, generator=generator)
        old = context - length
        pool.keys[0][own[:old]], pool.values[0][own[:old]] = keys[:old], values[:old]
        expected.append(reference(query, keys, values, options))
        queries.append(query), new_keys.append(keys[old:]), new_values.append(values[old:])
        tables.append(table)
        slots += own[old:].tolist()
    num_tokens = len(slots)
    batch = ScheduledBatch(
        token_ids=[0] * num_tokens,
        positions=[0] * num_tokens,
        slot_mapping=slots,
        query_lengths=[length for length, _ in spans],
        context_lengths=[context for _, context in spans],
        block_tables=tables,
        logits_indices=[],
    )
    packed = [torch.cat(parts) for parts in (queries, new_keys, new_values)]
    return handler(batch, pool).attend(0, *packed, options), torch.cat(expected)


OPTIONS = {
    "plain": AttentionOptions(),
    "scaled": AttentionOptions(scaling=0.7),
    "window": AttentionOptions(sliding_window=5),
    "softcap": AttentionOptions(softcap=1.5),
    "sinks": AttentionOptions(sinks=torch.linspace(-1, 2, NUM_HEADS)),
    "all": AttentionOptions(scaling=0.5, sliding_window=3, softcap=2.0, sinks=torch.linspace(-1, 2, NUM_HEADS)),
}
SPANS = {
    "decode": [(1, 9), (1, 1), (1, 30)],
    "verify": [(5, 12), (5, 5)],
    "uneven": [(1, 9), (5, 20), (3, 3)],
    "long": [(20, 33)],
    "far_apart": [(1, 3), (2, 120), (1, 7)],
    "mixed": [(1, 7), (19, 19), (4, 21), (17, 30)],
}
ANY_SCHEDULE = {  # spans of (query length, tokens before it)
    "spans": st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=4),
    "window": st.none() | st.integers(1, 40),
    "seed": st.integers(0, 1000),
}
