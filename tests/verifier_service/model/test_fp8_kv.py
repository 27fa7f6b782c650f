"""KV in FP8: what is stored, that every kernel reads it alike, and that drafts, caches, preemption change no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from exactness.small_engines import Generated, Hints, Limits, NoDrafts, generate, make_engine
from outrider.verifier_service.cpu.kernels import load_kernels
from outrider.verifier_service.handover.kv_bytes import RankKV, kv_fingerprint
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.attention import (
    AttentionContext,
    AttentionHandler,
    AttentionOptions,
    KVPool,
    LayerShape,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.cpu_attention import CpuContext, in_place_or_gathered
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.settled import resolve_kv_dtype
from outrider.verifier_service.model.step_graphs import GraphBackend
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.attention_steps import OPTIONS
from tiny.hub.families import make_family_checkpoint
from tiny.models import make_checkpoint, random_sequences, without_kernels
from tiny.played_graphs import played_backend
from tiny.triton_kernels import interpreted

FP8, CPU, BLOCK_SIZE, NUM_HEADS = torch.float8_e4m3fn, torch.device("cpu"), 4, 6
CODES = torch.arange(256, dtype=torch.uint8).view(FP8)
TRITON = ("model.triton_attention", "gpu.attention_kernels", "gpu.language")


def pool_of(
    dim: int, stored: torch.dtype | None = FP8, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> KVPool:
    shape, place = LayerShape(num_kv_heads=2, head_dim=dim, value_dim=dim), torch.device(device)
    return KVPool({0: shape}, num_blocks=32, block_size=BLOCK_SIZE, dtype=dtype, device=place, stored=stored)


def batch_of(lengths: list[int], contexts: list[int]) -> ScheduledBatch:
    """Sequences in neighbouring blocks, the last with a tree of three."""
    widths = [-(-context // BLOCK_SIZE) for context in contexts]
    firsts = [sum(widths[:index]) for index in range(len(widths))]
    spans = [range(context - length, context) for length, context in zip(lengths, contexts, strict=True)]
    return ScheduledBatch(
        token_ids=[0] * sum(lengths),
        positions=[place for span in spans for place in span],
        slot_mapping=[first * BLOCK_SIZE + place for first, span in zip(firsts, spans, strict=True) for place in span],
        query_lengths=lengths,
        context_lengths=contexts,
        block_tables=[list(range(first, first + width)) for first, width in zip(firsts, widths, strict=True)],
        logits_indices=[],
        tree_parents=[*([] for _ in lengths[1:]), [-1, 0, 0]],
    )


BATCH = batch_of([1, 20, 5], [9, 33, 30])


# --- what is stored ---


def test_numbers_are_rounded_to_the_nearest_and_bounded() -> None:
    pool, slots = pool_of(2), torch.tensor([5])
    key = torch.tensor([[[1.0625, 1e9], [-1e9, 0.0009765625]]])  # half a step above 1: to even; the smallest's half
    pool.write(0, slots, key, -key)
    assert pool.keys[0][5].float().tolist() == [[1.0, 448.0], [-448.0, 0.0]]
    assert pool.values[0][5].float().tolist() == [[-1.0, -448.0], [448.0, 0.0]]


def test_slots_and_blocks_move_as_they_are() -> None:
    pool = pool_of(8)
    pool.keys[0].view(torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    before = pool.keys[0].view(torch.uint8).clone()
    pool.move_slots([3, 4], [90, 91])
    pool.copy_blocks([0], [7])
    after = pool.keys[0].view(torch.uint8)
    assert torch.equal(after[90:92], before[3:5])
    assert torch.equal(after[28:32], before[:4])


# --- what is read ---


def attended(
    make: Callable[[ScheduledBatch, KVPool], AttentionHandler], pool: KVPool, options: AttentionOptions
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    dim = pool.keys[0].shape[2]
    for cache in (pool.keys[0], pool.values[0]):
        cache.copy_(torch.randn(cache.shape, generator=generator).to(FP8))  # also where nothing is rounded again
    drawn = torch.randn(BATCH.num_tokens, NUM_HEADS + 4, dim, generator=generator).to(pool.device, pool.dtype)
    rounded = drawn.to(FP8).to(pool.dtype)
    return make(BATCH, pool).attend(0, drawn[:, :NUM_HEADS], rounded[:, -4:-2], rounded[:, -2:], options)


@pytest.fixture(name="kernels")
def _kernels() -> None:
    if load_kernels(torch.float32) is None:
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")


@pytest.fixture(name="triton")
def interpreted_triton() -> Iterator[ModuleType]:
    pytest.importorskip("triton", reason="needs the package triton")
    with interpreted(*(f"outrider.verifier_service.{name}" for name in TRITON)) as module:
        yield module


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_reference_reads_what_was_stored(options: AttentionOptions) -> None:
    expected = attended(AttentionContext.of, pool_of(24, None), options)
    assert torch.equal(attended(AttentionContext.of, pool_of(24), options), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [24, 64])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_our_kernel_on_a_cpu_reads_the_same_bits(
    kernels: None, options: AttentionOptions, dim: int, dtype: torch.dtype
) -> None:
    expected = attended(in_place_or_gathered, pool_of(dim, None, dtype=dtype), options)
    pool = pool_of(dim, dtype=dtype)
    assert isinstance(in_place_or_gathered(BATCH, pool), CpuContext)
    assert torch.equal(attended(in_place_or_gathered, pool, options), expected)


@pytest.mark.parametrize("dim", [16, 32])
def test_our_kernel_on_a_cpu_knows_every_code(kernels: None, dim: int) -> None:
    """One key alone has weight 1: its value comes out."""
    heads = 256 // dim
    shape = LayerShape(num_kv_heads=heads, head_dim=dim, value_dim=dim)
    pool = KVPool({0: shape}, num_blocks=1, block_size=4, dtype=torch.float32, device=CPU, stored=FP8)
    rows, zeros = CODES.float().view(1, heads, dim), torch.zeros(1, heads, dim)
    batch = replace(batch_of([1], [1]), tree_parents=[])
    got = in_place_or_gathered(batch, pool).attend(0, zeros, zeros, rows, AttentionOptions())
    torch.testing.assert_close(got, rows, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_kernel_for_gpus_reads_the_same(triton: ModuleType, options: AttentionOptions) -> None:
    expected = attended(AttentionContext.of, pool_of(24, None), options)
    got = attended(triton.TritonContext.of, pool_of(24), options)
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80])
def test_a_gpu_reads_the_same(dim: int, dtype: torch.dtype) -> None:
    from outrider.verifier_service.model.triton_attention import TritonContext

    expected = attended(TritonContext.of, pool_of(dim, None, dtype=dtype, device="cuda"), AttentionOptions())
    got = attended(TritonContext.of, pool_of(dim, dtype=dtype, device="cuda"), AttentionOptions())
    torch.testing.assert_close(got, expected, atol=1e-2, rtol=1e-2)


# --- what is served ---

PROMPTS, NUM_NEW_TOKENS = random_sequences((5, 21, 14)), 12
FAMILIES = {"our decoder": "llama-3.1", "windows and sinks": "gpt-oss", "latents": "deepseek-v3"}


def runner_of(folder: Path, backend: GraphBackend | None = None, **fields: object) -> ModelRunner:
    options = {"num_kv_blocks": 64, "block_size": BLOCK_SIZE, "device": "cpu", "dtype": "float32", **fields}
    return ModelRunner(ModelConfig(path=str(folder), **options), TensorParallelGroup.single(), backend)


def requests_of(turns: str) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{turn}{index}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True),
            plan=SpeculationPlan(draft_length=4),
        )
        for turn in turns
        for index, prompt in enumerate(PROMPTS)
    ]


def alone(runner: ModelRunner) -> Generated:
    """One request after the other, none with a draft, a cached prefix or a chunk."""
    whole = Generated()
    for request in requests_of("a"):
        drafts = NoDrafts()
        whole.token_ids |= generate(make_engine(runner, drafts, Limits(num_blocks=64)), drafts, [request]).token_ids
    return whole


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_drafts_chunks_prefixes_and_preemption_change_no_token(tmp_path: Path, family: str) -> None:
    make_family_checkpoint(tmp_path, family)
    runner = runner_of(tmp_path, kv_cache_dtype="fp8", max_model_len=160)
    single = alone(runner).token_ids
    expected = {tuple(prompt): single[f"a{index}"] for index, prompt in enumerate(PROMPTS)}
    drafts = Hints(expected)
    engine = make_engine(runner, drafts, Limits(max_num_batched_tokens=24, num_blocks=14))
    generated = generate(engine, drafts, requests_of("ab"))
    for request in requests_of("ab"):
        assert generated.token_ids[request.request_id] == expected[request.prompt_token_ids]
    assert 0 < generated.num_accepted_tokens < generated.num_draft_tokens
    assert generated.num_cached_tokens > 0
    assert generated.num_preempted_waits > 0


def test_a_captured_step_holds_it_too(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with without_kernels():
        eager = runner_of(tmp_path, kv_cache_dtype="fp8")
        captured = runner_of(tmp_path, played_backend(), kv_cache_dtype="fp8")
        batch = replace(batch_of([7], [7]), token_ids=PROMPTS[1][:7], logits_indices=[6], tree_parents=[])
        torch.testing.assert_close(captured.execute(batch), eager.execute(batch), atol=1e-4, rtol=1e-4)
    assert captured.graphs.counts.num_replayed == 1


def test_it_is_lossy_and_the_same_memory_holds_more(tmp_path: Path) -> None:
    """The start's check compares what is not rounded, and so passes."""
    make_checkpoint(tmp_path, "llama")
    size = {"num_kv_blocks": None, "kv_cache_memory_bytes": 100_000, "check_logits": True}
    plain, fp8 = runner_of(tmp_path, **size), runner_of(tmp_path, **size, kv_cache_dtype="fp8")
    assert fp8.num_blocks // 4 == plain.num_blocks
    batch = replace(batch_of([20], [20]), token_ids=PROMPTS[1][:20], logits_indices=[19], tree_parents=[])
    first, second = plain.execute(batch), fp8.execute(batch)
    assert 1e-3 < (first - second).norm() / first.norm() < 0.2


def test_it_moves_to_a_verifier_that_has_it_and_to_no_other(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    giver, taker, other = (runner_of(tmp_path, kv_cache_dtype=name) for name in ("fp8", "fp8", "auto"))
    assert kv_fingerprint(giver) == kv_fingerprint(taker) != kv_fingerprint(other)
    giver.execute(replace(batch_of([20], [20]), token_ids=PROMPTS[1][:20], logits_indices=[19], tree_parents=[]))
    slots, places = list(range(20)), list(range(40, 60))
    assert RankKV(giver).num_bytes_per_token * 4 == RankKV(other).num_bytes_per_token
    RankKV(taker).write(places, RankKV(giver).read(slots))
    for index, keys in giver.pool.keys.items():
        assert torch.equal(taker.pool.keys[index][places].float(), keys[slots].float())
        assert torch.equal(taker.pool.values[index][places].float(), giver.pool.values[index][slots].float())
        assert keys[slots].float().any()


def test_other_formats_are_refused_by_the_fields_name() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype must be one of auto, fp8"):
        ModelConfig(path="model", kv_cache_dtype="fp8_e5m2")


def test_a_gpu_without_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="kv_cache_dtype: fp8 needs a device"):
        resolve_kv_dtype("fp8", torch.bfloat16, torch.device("cuda"))
    assert resolve_kv_dtype("auto", torch.bfloat16, torch.device("cuda")) is torch.bfloat16
