"""Paged attention against a slow reference that knows nothing of blocks, groups or padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import (
    AttentionContext,
    AttentionOptions,
    KVPool,
    LayerShape,
    ShapeRecorder,
    attend_by_hand,
    attend_paged,
    entered,
    group_members,
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


def test_blocks_are_all_read_before_the_first_is_written():
    pool = make_pool()
    caches = [cache.view(NUM_BLOCKS, -1) for cache in (pool.keys[0], pool.values[0])]
    before = [cache.clone() for cache in caches]
    pool.copy_blocks([1, 2, 2], [2, 1, 7])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[[2, 1, 7]], old[[1, 2, 2]])
        untouched = [block for block in range(NUM_BLOCKS) if block not in (1, 2, 7)]
        assert torch.equal(cache[untouched], old[untouched])
    pool.copy_blocks([], [])


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


def run_both(pool: KVPool, spans: list[tuple[int, int]], options: AttentionOptions, seed: int = 0):
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
    return AttentionContext.of(batch, pool).attend(0, *packed, options), torch.cat(expected)


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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_equals_the_reference(spans, options):
    got, expected = run_both(make_pool(), spans, options)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=4),
    window=st.none() | st.integers(1, 40),
    seed=st.integers(0, 1000),
)
def test_any_schedule_equals_the_reference(spans, window, seed):
    spans = [(length, length + old) for length, old in spans]
    got, expected = run_both(make_pool(), spans, AttentionOptions(sliding_window=window), seed)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_by_hand_equals_the_fused_call():
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(2, 6, 4, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, 2, 2, 9, HEAD_DIM, generator=generator)
    bias = torch.zeros(2, 1, 4, 9).masked_fill_(torch.rand(2, 1, 4, 9, generator=generator) < 0.3, float("-inf"))
    bias[..., 0] = 0.0
    fused = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)
    torch.testing.assert_close(attend_by_hand(query, key, value, bias, AttentionOptions(), repeats=1), fused)


def test_short_queries_share_a_call_with_contexts_of_like_length():
    widths, lengths = [1, 30, 16, 100, 17, 2], [1, 1, 5, 16, 1, 17]
    batch = ScheduledBatch(
        token_ids=[],
        positions=[],
        slot_mapping=[],
        query_lengths=lengths,
        context_lengths=[width * BLOCK_SIZE for width in widths],
        block_tables=[[0] * width for width in widths],
        logits_indices=[],
    )
    assert group_members(batch) == [[0, 2], [1, 4], [3], [5]]


def test_only_the_steps_own_slots_are_written():
    pool = make_pool()
    before = pool.keys[0].clone()
    run_both(pool, [(1, 1)], AttentionOptions())
    assert (pool.keys[0] != before).any(dim=(1, 2)).sum() == 1


class Recorder:
    def __init__(self) -> None:
        self.options: AttentionOptions | None = None

    def attend(self, layer_index, query, key, value, options):
        self.options = options
        return query


def test_the_registered_function_passes_everything_on():
    module = torch.nn.Module()
    module.layer_idx = 3
    tensor, sinks, recorder = torch.zeros(1, 2, 3, 4), torch.ones(2), Recorder()
    with entered(recorder):
        attend_paged(module, tensor, tensor, tensor, None, scaling=2.0, sliding_window=7, softcap=5.0, s_aux=sinks)
    assert recorder.options == AttentionOptions(scaling=2.0, sliding_window=7, softcap=5.0, sinks=sinks)


def test_contexts_do_not_nest_and_end():
    module, tensor = torch.nn.Module(), torch.zeros(1, 2, 3, 4)
    module.layer_idx = 0
    with entered(Recorder()), pytest.raises(AssertionError, match="nest"), entered(Recorder()):
        pass
    with pytest.raises(RuntimeError, match="inside"), entered(Recorder()):
        raise RuntimeError("inside")
    with pytest.raises(AssertionError, match="outside"):
        attend_paged(module, tensor, tensor, tensor, None)


def test_the_recorder_notes_shapes():
    recorder = ShapeRecorder()
    output = recorder.attend(
        4, torch.zeros(1, 6, 8), torch.zeros(1, 2, 8), torch.zeros(1, 2, 6), AttentionOptions()
    )
    assert output.shape == (1, 6, 6)
    assert recorder.shapes == {4: SHAPE}
    assert SHAPE.num_elements == 28
