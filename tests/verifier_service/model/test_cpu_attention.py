"""The kernels in place against the slow reference and, for trees, torch's; what becomes of a machine without them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from outrider.verifier_service.cpu.isa import Isa
from outrider.verifier_service.cpu.kernels import Kernels, load_kernels, own_isa
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model import cpu_attention
from outrider.verifier_service.model.attention import AttentionContext, AttentionOptions, KVPool, LayerShape
from outrider.verifier_service.model.cpu_attention import CpuContext, in_place_or_gathered
from tiny.attention_steps import ANY_SCHEDULE, BLOCK_SIZE, OPTIONS, SPANS, make_pool, run_both
from tiny.models import played_tiles

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if load_kernels(torch.float32) is None:
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")


def in_place(batch: ScheduledBatch, pool: KVPool) -> CpuContext:
    context = in_place_or_gathered(batch, pool)
    assert isinstance(context, CpuContext)
    return context


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_equals_the_reference(spans, options):
    got, expected = run_both(make_pool(), spans, options, handler=in_place)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(**ANY_SCHEDULE)
def test_any_schedule_equals_the_reference(spans, window, seed):
    spans = [(length, length + old) for length, old in spans]
    got, expected = run_both(make_pool(), spans, AttentionOptions(sliding_window=window), seed, in_place)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def batch_of(
    contexts: list[int],
    lengths: list[int],
    trees: list[list[int]] | None = None,
    ends: list[list[int]] | None = None,
) -> ScheduledBatch:
    """Sequences one after the other in the pool."""
    widths = [-(-context // BLOCK_SIZE) for context in contexts]
    firsts = [sum(widths[:i]) for i in range(len(widths))]
    tables = [list(range(first, first + width)) for first, width in zip(firsts, widths, strict=True)]
    places = [(i, place) for i, context in enumerate(contexts) for place in range(context - lengths[i], context)]
    return ScheduledBatch(
        token_ids=[0] * len(places),
        positions=[place for _, place in places],
        slot_mapping=[firsts[i] * BLOCK_SIZE + place for i, place in places],
        query_lengths=lengths,
        context_lengths=contexts,
        block_tables=tables,
        logits_indices=[],
        tree_parents=trees or [],
        tree_ends=ends or [],
    )


def drawn(
    batch: ScheduledBatch, dtype: torch.dtype, *, dim: int = 64, heads: tuple[int, int] = (9, 3), fp8: bool = False
) -> tuple[KVPool, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shape, (num_heads, num_kv_heads) = LayerShape(num_kv_heads=heads[1], head_dim=dim, value_dim=dim), heads
    num_blocks, stored = 1 + max(map(max, batch.block_tables)), torch.float8_e4m3fn if fp8 else None
    pool = KVPool({0: shape}, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=CPU, stored=stored)
    for cache in (pool.keys[0], pool.values[0]):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    # as a fused projection leaves them: views of one tensor
    fused = torch.randn(batch.num_tokens, num_heads + 2 * num_kv_heads, dim, generator=generator).to(dtype)
    return pool, list(fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1))


def attended(
    batch: ScheduledBatch, dtype: torch.dtype, make=in_place, *, dim=64, heads=(9, 3), fp8=False, **options: object
) -> torch.Tensor:
    pool, tensors = drawn(batch, dtype, dim=dim, heads=heads, fp8=fp8)
    return make(batch, pool).attend(0, *tensors, AttentionOptions(**options))


def exact(
    batch: ScheduledBatch, *, dim: int = 64, heads=(9, 3), fp8=False, **options: object
) -> tuple[torch.Tensor, float]:
    """What numbers of bfloat16 give in float32, and the largest value."""
    pool, tensors = drawn(batch, torch.bfloat16, dim=dim, heads=heads, fp8=fp8)
    shapes = {0: LayerShape(num_kv_heads=heads[1], head_dim=dim, value_dim=dim)}
    wide = KVPool(shapes, num_blocks=pool.num_blocks, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    wide.keys[0].copy_(pool.keys[0])
    wide.values[0].copy_(pool.values[0])
    query, key, value = (t.float() for t in tensors)
    if fp8:
        key, value = key.to(torch.float8_e4m3fn).float(), value.to(torch.float8_e4m3fn).float()
    outputs = AttentionContext.of(batch, wide).attend(0, query, key, value, AttentionOptions(**options))
    return outputs, wide.values[0].abs().max().item()


def test_half_precision_is_rounded_once_at_the_end():
    batch = batch_of([9, 40, 130], [1, 5, 1])
    got, (expected, largest) = attended(batch, torch.bfloat16).float(), exact(batch)
    if own_isa() is Isa.AMX:  # so are weights, each by 2^-9 of its own at most
        assert (got - expected).abs().max() < 2**-8 * largest
    else:
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=2**-8)


# what sequences have after their last committed token: none, a tree, a draft of one token and two blocks of masks
TREES = batch_of(
    [9, 40, 12, 30, 33, 33],
    [1, 25, 4, 9, 6, 29],
    [[], [], [-1, 0, 0], [-1, -1, 0, 0, 1, 2, 2, 5], *[[-1, -1, 1, 0, 3]] * 2],
    [[], [], [], [], *[[1, 3, 3, 5, 5]] * 2],
)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 12])
@pytest.mark.parametrize("dim", [24, 32, 64])
def test_trees_and_masks_equal_torchs(dim: int, window: int | None):
    options = {"sliding_window": window, "softcap": 2.0 if window == 3 else None}
    expected = attended(TREES, torch.float32, AttentionContext.of, dim=dim, **options)
    torch.testing.assert_close(attended(TREES, torch.float32, dim=dim, **options), expected, atol=1e-5, rtol=1e-4)
    chains = dataclasses.replace(TREES, tree_parents=[], tree_ends=[])
    assert (attended(chains, torch.float32, dim=dim, **options) - expected).abs().max() > 0.01 or window == 1


# --- by tiles ---

# within a block of the softmax and over several; chains, a prompt's chunk, trees
LONG = batch_of(
    [9, 530, 1100, 600, 40], [1, 5, 300, 9, 4], [[], [], [], [-1, -1, 0, 0, 1, 2, 2, 5], [-1, 0, 0]], [[]] * 5
)
TILED = {
    "plain": {},
    "scaled": {"scaling": 0.3},
    "window": {"sliding_window": 3},
    "long window": {"sliding_window": 550},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 2, 9)},
}


@pytest.fixture(scope="module")
def played() -> Kernels:
    return played_tiles(torch.bfloat16)


def require_only_weights_rounded(played: Kernels, batch: ScheduledBatch, **options: object) -> None:
    got = attended(batch, torch.bfloat16, lambda *step: CpuContext(*step, played), **options).float()
    expected, largest = exact(batch, **options)
    assert (got - expected).abs().max() < 2**-8 * largest


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("options", TILED.values(), ids=TILED)
def test_by_tiles_only_weights_are_rounded_too(played, options, dim):
    require_only_weights_rounded(played, LONG, dim=dim, **options)


# queries that fill no tile, one tile, several, and more than a span
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (16, 1), (64, 2), (200, 1)], ids=str)
def test_by_tiles_any_number_of_heads_may_share_keys(played, heads):
    require_only_weights_rounded(played, LONG, dim=32, heads=heads)


@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
def test_by_tiles_trees_and_masks_are_seen_as_elsewhere(played, fp8):
    require_only_weights_rounded(played, TREES, fp8=fp8)
    require_only_weights_rounded(played, TREES, fp8=fp8, sliding_window=3)


@pytest.mark.skipif(own_isa() is not Isa.AMX, reason="needs a processor with AMX, this one has none or may not use it")
@pytest.mark.parametrize("options", TILED.values(), ids=TILED)
def test_a_processors_tiles_make_the_bits_of_played_ones(played, options):
    expected = attended(LONG, torch.bfloat16, lambda *step: CpuContext(*step, played), **options)
    assert torch.equal(attended(LONG, torch.bfloat16, **options), expected)


def test_without_kernels_torch_attends(monkeypatch):
    monkeypatch.setattr(cpu_attention, "load_kernels", lambda dtype: None)
    assert isinstance(in_place_or_gathered(batch_of([4], [1]), make_pool()), AttentionContext)
