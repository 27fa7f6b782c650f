"""The Triton kernels against the gathered reference: interpreted here, on the device where there is one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.verifier_service.gpu.transfers import num_bytes
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.attention import AttentionContext, AttentionOptions, KVPool, LayerShape
from outrider.verifier_service.model.paged_metadata import WORD_BITS, PagedMetadata
from outrider.verifier_service.model.step_graphs import (
    NUM_MODEL_PARTS,
    Bucket,
    StepBuffers,
    padded,
    step_layout,
    step_parts,
)
from tiny.triton_kernels import compiled_for_hopper, forget, interpreted

triton = pytest.importorskip("triton", reason="needs the package triton")

from outrider.verifier_service.gpu import attention_kernels, language  # noqa: E402
from outrider.verifier_service.model import triton_attention  # noqa: E402

BLOCK_SIZE = 4
MODULES = (
    "outrider.verifier_service.model.triton_attention",
    "outrider.verifier_service.gpu.attention_kernels",
    "outrider.verifier_service.gpu.language",
)


@pytest.fixture(name="interpreted")
def interpreted_module() -> Iterator[ModuleType]:
    with interpreted(*MODULES) as module:
        yield module


@dataclass(frozen=True, kw_only=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 6
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """`num_old` tokens in the pool, then `num_chain` new ones, then a tree."""

    num_old: int = 0
    num_chain: int = 1
    parents: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        return self.num_chain + len(self.parents)


@dataclass(kw_only=True)
class Step:
    batch: ScheduledBatch
    pool: KVPool  # nothing but NaN where no sequence has a token
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_step(sequences: list[Sequence], shape: Shape, seed: int = 0, device: str = "cpu") -> Step:
    """A step over scattered blocks, drawn on the CPU whatever the device; nobody has the last one."""
    generator = torch.Generator().manual_seed(seed)
    widths = [-(-(sequence.num_old + sequence.length) // BLOCK_SIZE) for sequence in sequences]
    num_blocks = sum(widths) + 3
    blocks = torch.randperm(num_blocks - 1, generator=generator).tolist()
    tables = [[blocks.pop() for _ in range(width)] for width in widths]
    pool = KVPool(
        {0: LayerShape(num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, value_dim=shape.value_dim)},
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=shape.dtype,
        device=torch.device(device),
    )
    slots: list[int] = []
    for cache in (pool.keys[0], pool.values[0]):
        drawn = torch.full(cache.shape, torch.nan)
        for sequence, table in zip(sequences, tables, strict=True):
            own = [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in range(sequence.num_old)]
            drawn[own] = torch.randn(len(own), *cache.shape[1:], generator=generator)
        cache.copy_(drawn)
    for sequence, table in zip(sequences, tables, strict=True):
        places = range(sequence.num_old, sequence.num_old + sequence.length)
        slots += [table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places]
    batch = ScheduledBatch(
        token_ids=[0] * len(slots),
        positions=[0] * len(slots),
        slot_mapping=slots,
        query_lengths=[sequence.length for sequence in sequences],
        context_lengths=[sequence.num_old + sequence.length for sequence in sequences],
        block_tables=tables,
        logits_indices=[],
        tree_parents=[list(sequence.parents) for sequence in sequences] if any(s.parents for s in sequences) else [],
        tree_ends=[list(sequence.ends) for sequence in sequences] if any(s.ends for s in sequences) else [],
    )
    sizes = ((shape.num_heads, shape.head_dim), (shape.num_kv_heads, shape.head_dim))
    drawn = [
        torch.randn(len(slots), heads, dim, generator=generator).to(device, shape.dtype)
        for heads, dim in (*sizes, (shape.num_kv_heads, shape.value_dim))
    ]
    return Step(batch=batch, pool=pool, query=drawn[0], key=drawn[1], value=drawn[2])


def reference(step: Step, options: AttentionOptions) -> torch.Tensor:
    """The gathered reference in float32: [num_tokens, num_heads, value_dim]."""
    pool = KVPool(
        {0: LayerShape(num_kv_heads=step.key.shape[1], head_dim=step.key.shape[2], value_dim=step.value.shape[2])},
        num_blocks=step.pool.num_blocks,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=step.pool.device,
    )
    pool.keys[0].copy_(step.pool.keys[0].nan_to_num())  # 0 * NaN is NaN there
    pool.values[0].copy_(step.pool.values[0].nan_to_num())
    tensors = [tensor.float() for tensor in (step.query, step.key, step.value)]
    return AttentionContext.of(step.batch, pool).attend(0, *tensors, options)


def attend(module: ModuleType, step: Step, options: AttentionOptions, num_splits: int | None = None) -> torch.Tensor:
    """Write the step's keys and values, then run the kernels: [num_tokens, num_heads, value_dim]."""
    metadata = PagedMetadata.of(step.batch, BLOCK_SIZE, step.pool.device)
    keys, values = step.pool.keys[0], step.pool.values[0]
    keys[metadata.slot_mapping] = step.key
    values[metadata.slot_mapping] = step.value
    return module.paged_attention(step.query, keys, values, metadata, options, num_splits=num_splits)


TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def tolerance_of(options: AttentionOptions, shape: Shape) -> float:
    """Return how far sums in another order may be apart; in float32 that grows with the size of the logits.

    An exponential makes an absolute error of a logit a relative one of its weight. Logits of standard normal queries
    and keys have a deviation of scaling * sqrt(head_dim), usually 1. With heads of 64 and a scaling of 0.7 they reach
    31, and the reference itself is 1.3e-5 away from float64.
    """
    deviation = 1.0 if options.scaling is None or options.softcap else options.scaling * shape.head_dim**0.5
    return TOLERANCES[shape.dtype] * (max(1.0, deviation) if shape.dtype is torch.float32 else 1.0)


def require_equal(
    module: ModuleType,
    sequences: list[Sequence],
    options: AttentionOptions,
    shape: Shape = Shape(),
    num_splits: int | None = None,
    seed: int = 0,
    device: str = "cpu",
) -> None:
    step = make_step(sequences, shape, seed, device)
    got = attend(module, step, options, num_splits)
    assert got.dtype == shape.dtype
    tolerance = tolerance_of(options, shape)
    torch.testing.assert_close(got.float(), reference(step, options), atol=tolerance, rtol=tolerance)


SINKS = torch.linspace(-1, 2, 4)
OPTIONS = {
    "plain": AttentionOptions(),
    "scaled": AttentionOptions(scaling=0.7),
    "window": AttentionOptions(sliding_window=5),
    "wide_window": AttentionOptions(sliding_window=40),
    "softcap": AttentionOptions(softcap=1.5),
    "sinks": AttentionOptions(sinks=SINKS),
    "all": AttentionOptions(scaling=0.5, sliding_window=3, softcap=2.0, sinks=SINKS),
}
TREE = (-1, -1, 0, 0, 1, 2, -1, 4)
BUSHY = tuple((index - 1) // 2 if index % 3 else index - 2 for index in range(1, 131))  # three words of ancestors
# a draft of five tokens, and a block of five masks after each of its prefixes: more than one tile
MASK_BLOCKS = [(count, 5 * (count + 1), 5 * (count + 2)) for count in range(6)]  # drafts before it, first mask, end
MASKS = Sequence(
    num_old=33,
    num_chain=2,
    parents=(*range(-1, 4), *(parent for count, at, end in MASK_BLOCKS for parent in (count - 1, *range(at, end - 1)))),
    ends=(*range(1, 6), *(end for _, _, end in MASK_BLOCKS for _ in range(5))),
)
SEQUENCES = {
    "masks": [Sequence(num_old=3, parents=TREE), MASKS, Sequence(num_old=9)],
    "decode": [Sequence(num_old=8), Sequence(), Sequence(num_old=29)],
    "chains": [Sequence(num_old=7, num_chain=5), Sequence(num_chain=5)],
    "prefill": [Sequence(num_old=70, num_chain=75)],
    "mixed": [Sequence(num_old=6), Sequence(num_chain=19), Sequence(num_old=150, num_chain=4)],
    "tree": [Sequence(num_old=9, parents=TREE)],
    "tree_alone": [Sequence(num_chain=0, parents=TREE)],
    "trees_and_chains": [
        *(Sequence(num_old=3, parents=TREE), Sequence(num_old=80, num_chain=3)),
        *(Sequence(num_old=60, num_chain=2, parents=(-1, 0, 0)), Sequence(num_chain=21, parents=(-1, -1))),
    ],
    "large_tree": [Sequence(num_old=2), Sequence(num_old=37, parents=(-1, *BUSHY))],
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_equals_the_reference(interpreted, sequences, options):
    require_equal(interpreted, sequences, options)


@pytest.mark.parametrize("num_splits", [2, 9])
@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
def test_split_contexts_equal_the_reference(interpreted, options, num_splits):
    sequences = [Sequence(num_old=150, parents=(-1, 0, 0)), Sequence()]
    require_equal(interpreted, sequences, options, num_splits=num_splits)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_kv_heads=4),
        Shape(num_heads=8, num_kv_heads=1),
        Shape(num_heads=6, num_kv_heads=2, head_dim=20, value_dim=33),
        Shape(num_heads=7, num_kv_heads=1, head_dim=80, value_dim=80),
        Shape(num_heads=24, num_kv_heads=1),
        Shape(dtype=torch.float16, head_dim=64, value_dim=64),
    ],  # no bfloat16: the interpreter multiplies its bits as integers
    ids=str,
)
def test_any_shape_of_heads(interpreted, shape):
    sequences = [Sequence(num_old=70, parents=(-1, 0, -1)), Sequence(num_chain=3), Sequence(num_old=30)]
    options = AttentionOptions(sinks=torch.linspace(-1, 1, shape.num_heads), sliding_window=50)
    require_equal(interpreted, sequences, options, shape)


@st.composite
def drawn_sequences(draw: st.DrawFn) -> Sequence:
    num_nodes = draw(st.integers(0, 12))
    parents = tuple(draw(st.integers(-1, index - 1)) for index in range(num_nodes))
    return Sequence(
        num_old=draw(st.integers(0, 140)), num_chain=draw(st.integers(0 if num_nodes else 1, 6)), parents=parents
    )


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])  # it has no state
@given(
    sequences=st.lists(drawn_sequences(), min_size=1, max_size=3),
    window=st.none() | st.integers(1, 80),
    num_splits=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_any_schedule_equals_the_reference(interpreted, sequences, window, num_splits, seed):
    require_equal(interpreted, sequences, AttentionOptions(sliding_window=window), num_splits=num_splits, seed=seed)


def test_queries_may_be_a_view_of_something_wider(interpreted):
    step = make_step([Sequence(num_old=5, num_chain=3)], Shape())
    expected = reference(step, OPTIONS["plain"])
    wide = torch.cat([step.query, torch.full((3, 4, 8), torch.nan)], dim=1)
    step.query = wide[:, :4]
    torch.testing.assert_close(attend(interpreted, step, OPTIONS["plain"]), expected)


def test_a_launch_is_right_for_whatever_its_buffers_hold(interpreted):
    """As in a captured step: the bucket alone shapes the launch, the buffers bring what changes."""
    bucket, table_width = Bucket(16, 4, has_trees=True), 40
    shape, options = Shape(), OPTIONS["all"]
    layout = step_layout(bucket, table_width)
    buffers = StepBuffers(num_bytes(layout), torch.device("cpu"))
    place = buffers.place(layout)
    metadata = PagedMetadata.over(
        place.parts[NUM_MODEL_PARTS:],
        max_query_length=4,
        max_context_length=table_width * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        num_idle=1,
    )
    steps = [
        make_step([Sequence(num_old=60, num_chain=2, parents=(-1, 0, 0)), Sequence(num_old=5)], shape),
        make_step([Sequence(num_old=3, parents=TREE), Sequence(num_old=80, num_chain=3), Sequence()], shape, seed=1),
    ]
    for step in (*steps, steps[0]):
        count, null_block = step.batch.num_tokens, step.pool.num_blocks - 1
        assert all(null_block not in table for table in step.batch.block_tables)
        expected = reference(step, options)
        buffers.fill(place, step_parts(padded(step.batch, bucket, null_block, BLOCK_SIZE)))
        own = (step.query, step.key, step.value)
        tensors = [torch.cat([each, torch.zeros(16 - count, *each.shape[1:])]) for each in own]
        got = interpreted.TritonContext(metadata, step.pool).attend(0, *tensors, options)
        torch.testing.assert_close(got[:count], expected, atol=2e-6, rtol=2e-6)
        assert not got.isnan().any()


# The host's side.


def test_chains_carry_no_masks():
    step = make_step(SEQUENCES["chains"], Shape())
    step.batch = replace(step.batch, tree_parents=[[], []])
    metadata = PagedMetadata.of(step.batch, BLOCK_SIZE, torch.device("cpu"))
    assert metadata.tree_sizes is metadata.positions is metadata.ancestors is None


def test_keys_are_split_only_to_fill_the_device():
    split = triton_attention.choose_num_splits
    assert split(8, 32_768, 132) == 33
    assert split(8, 1_024, 132) == 4
    assert split(8, 200, 132) == 1
    assert split(300, 32_768, 132) == 1
    assert split(1, 1 << 20, 132) == triton_attention.MAX_SPLITS


@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256, 512])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_tiles_hold_a_token_and_fit_the_memory(group_size, dim, element_bytes):
    for length in (1, 8, 4_096):
        tile = triton_attention.tile_of(length, group_size, dim, dim, element_bytes)
        assert 1 <= tile.num_tokens * group_size <= tile.num_rows
        assert tile.num_keys >= 16
        assert tile.num_keys <= WORD_BITS
        padded = 1 << (dim - 1).bit_length()
        stages = (tile.num_stages - 1) * tile.num_keys * 2 * padded * element_bytes
        assert stages + tile.num_rows * padded * element_bytes <= 227 << 10


def test_without_triton_the_module_imports_and_says_what_is_missing():
    with pytest.MonkeyPatch.context() as patch:
        forget(patch, *MODULES)
        patch.setitem(sys.modules, "triton", None)
        module = importlib.import_module(MODULES[0])
        with pytest.raises(RuntimeError, match="needs the package triton"):
            attend(module, make_step([Sequence()], Shape()), AttentionOptions())


# The compiler, which needs no device.


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET leaves nothing to compile")
def test_nothing_is_compiled_anew_for_other_lengths():
    kernel = attention_kernels.attention_kernel
    assert {param.name for param in kernel.params if param.do_not_specialize} == set(language.PER_STEP)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET leaves nothing to compile")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton brings its assembler for Linux only")
def test_both_kernels_compile_for_an_h100(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    tile = triton_attention.tile_of(8, 4, 64, 64, 2)
    sizes = {"GROUP": 4, "HEAD_DIM": 64, "VALUE_DIM": 64, "BLOCK_D": 64, "BLOCK_V": 64, "BLOCK_SIZE": 16}
    sizes |= {"TOKENS": tile.num_tokens, "ROWS": tile.num_rows, "KEYS": tile.num_keys}
    flags = dict.fromkeys(("HAS_WINDOW", "HAS_SOFTCAP", "HAS_SINKS", "HAS_TREES", "IS_SPLIT"), True)
    kernel = attention_kernels.attention_kernel
    for cache in ("*bf16", "*fp8e4nv"):
        compiled = compile_for_hopper(kernel, {**sizes, **flags}, tile.num_warps, tile.num_stages, cache)
        assert "wgmma" in compiled.asm["ptx"]
        assert compiled.metadata.shared <= 227 << 10
        assert ("e4m3x2" in compiled.asm["ptx"]) == (cache == "*fp8e4nv")
    compile_for_hopper(attention_kernels.join_kernel, {"VALUE_DIM": 64, "BLOCK_V": 64, "AT_ONCE": 16}, 4, 3)


def compile_for_hopper(kernel, constants: dict[str, int], num_warps: int, num_stages: int, cache: str = "*bf16"):
    types = {"log_weights": "*fp32", "parts": "*fp32", "ancestors": "*i64"}
    types |= {"inner_scale": "fp32", "outer_scale": "fp32"}
    types |= dict.fromkeys(("output", "query", "sinks"), "*bf16") | dict.fromkeys(("key_cache", "value_cache"), cache)
    types |= dict.fromkeys(("query_starts", "context_lengths", "block_tables", "tree_sizes", "positions"), "*i32")
    return compiled_for_hopper(kernel, types, constants, num_warps, num_stages)


# The device.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_splits", [None, 1, 5])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_a_gpu_equals_the_reference(sequences, options, num_splits, dtype):
    options = replace(options, sinks=None if options.sinks is None else options.sinks.cuda())
    for dim in (64, 80):
        shape = Shape(num_heads=4, num_kv_heads=1, head_dim=dim, value_dim=dim, dtype=dtype)
        require_equal(triton_attention, sequences, options, shape, num_splits, device="cuda")


@pytest.mark.gpu
def test_a_captured_graph_attends_to_what_is_in_the_pool_later():
    shape = Shape(num_heads=8, num_kv_heads=2, head_dim=64, value_dim=64, dtype=torch.bfloat16)
    step = make_step([Sequence(num_old=600, parents=TREE), Sequence(num_old=9)], shape, device="cuda")
    metadata = PagedMetadata.of(step.batch, BLOCK_SIZE, step.pool.device)
    arguments = (step.query, step.pool.keys[0], step.pool.values[0], metadata, AttentionOptions())
    attend(triton_attention, step, AttentionOptions())  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = triton_attention.paged_attention(*arguments)
    step.query.mul_(-1.5)
    step.pool.values[0].mul_(0.5)
    graph.replay()
    assert torch.equal(output, triton_attention.paged_attention(*arguments))
