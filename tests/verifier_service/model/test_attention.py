"""Paged attention over gathered blocks against a slow reference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import (
    AttentionOptions,
    KVPool,
    LayerShape,
    attend_paged,
    entered,
    group_members,
)
from tiny.attention_steps import (
    ANY_SCHEDULE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    OPTIONS,
    SPANS,
    make_pool,
    run_both,
)


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


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_equals_the_reference(spans, options):
    got, expected = run_both(make_pool(), spans, options)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(**ANY_SCHEDULE)
def test_any_schedule_equals_the_reference(spans, window, seed):
    spans = [(length, length + old) for length, old in spans]
    got, expected = run_both(make_pool(), spans, AttentionOptions(sliding_window=window), seed)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


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


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_pool_on_a_cpu_takes_memory_once_it_is_written():
    shape, size = LayerShape(num_kv_heads=2, head_dim=64, value_dim=64), 1 << 28
    before = resident_bytes()
    num_blocks = size // (16 * shape.num_elements * 4)
    pool = KVPool({0: shape}, num_blocks=num_blocks, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    assert pool.keys[0].nbytes + pool.values[0].nbytes == size
    assert resident_bytes() - before < size / 8
    pool.keys[0][-16:] = 1.0
    assert (pool.keys[0][-32:-16].abs().sum(), pool.keys[0][-16:].sum()) == (0.0, 16 * 2 * 64)
    assert pool.values[0].data_ptr() % 64 == 0, "as kernels like it"


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


def test_contexts_do_not_nest_and_end():
    module, tensor = torch.nn.Module(), torch.zeros(1, 2, 3, 4)
    module.layer_idx = 0
    with entered(Recorder()), pytest.raises(AssertionError, match="nest"), entered(Recorder()):
        pass
    with pytest.raises(RuntimeError, match="inside"), entered(Recorder()):
        raise RuntimeError("inside")
    with pytest.raises(AssertionError, match="outside"):
        attend_paged(module, tensor, tensor, tensor, None)
