"""Rooflines by hand: H100 data sheet figures, an 8.03 G parameter model."""

from __future__ import annotations

import pytest

from outrider.lab.simulate.accelerators import (
    ACCELERATORS,
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    STEP_OVERHEAD_S,
    ModelShape,
    StepTiming,
    kv_capacity,
    smallest_tensor_parallel_size,
)

H100 = ACCELERATORS["H100"]
LLAMA_8B = ModelShape.llama_like(8.03e9)


def test_a_small_step_reads_the_weights_and_the_kv_once() -> None:
    timing = StepTiming.roofline(H100, LLAMA_8B)
    # 16.06 GB of weights at 0.85 x 3.35 TB/s are 5.640 ms, 10,000 positions of 131,072 bytes 0.460 ms
    assert timing.seconds(1, 0) == pytest.approx(5.640e-3 + 1.2e-3, abs=1e-6)
    assert timing.seconds(1, 10_000) - timing.seconds(1, 0) == pytest.approx(0.4603e-3, rel=1e-3)


def test_a_large_step_is_bound_by_compute() -> None:
    timing = StepTiming.roofline(H100, LLAMA_8B)
    # 2 x 8.03 GFLOP a token at 0.7 x 989 TFLOP/s: 23.198 us
    assert timing.seconds(2048, 0) == pytest.approx(2048 * 23.198e-6 + 1.2e-3, rel=1e-3)
    assert timing.seconds(2048, 1000) == timing.seconds(2048, 0)


def test_the_knee_is_where_both_bounds_meet() -> None:
    timing = StepTiming.roofline(H100, LLAMA_8B)
    # 989e12 x 0.7 / (3.35e12 x 0.85): 243 tokens, for 2 FLOP and 2 bytes a parameter
    assert timing.knee() == pytest.approx(989e12 * COMPUTE_EFFICIENCY / (3.35e12 * MEMORY_EFFICIENCY))
    assert timing.seconds(timing.knee() - 1, 0) == timing.seconds(1, 0)
    assert timing.seconds(timing.knee() + 1, 0) > timing.seconds(1, 0)


def test_the_published_fit_of_an_8b_model_on_an_h100_is_near() -> None:
    # SpecDecode-Bench (arXiv 2601.11580), at batch 1: 5.886 ms + 1.207 ms overhead
    assert StepTiming.roofline(H100, LLAMA_8B).seconds(1, 500) == pytest.approx(7.13e-3, rel=0.05)


def test_tensor_parallelism_divides_the_work_and_adds_all_reduces() -> None:
    model = ModelShape.llama_like(70.6e9)
    timing = StepTiming.roofline(H100, model, 4)
    assert timing.base_s == pytest.approx(StepTiming.roofline(H100, model).base_s / 4)
    assert timing.overhead_s == pytest.approx(STEP_OVERHEAD_S + 160 * 8e-6)
    # 160 all-reduces of 8192 x 2 bytes, 2 x 3/4 of them over a link of 450 GB/s
    assert timing.link_token_s == pytest.approx(160 * 1.5 * 16384 / 450e9)
    assert StepTiming.roofline(H100, model).link_token_s == 0.0


def test_a_draft_model_on_a_cheap_device_takes_the_time_of_its_memory() -> None:
    draft = ModelShape.llama_like(1e9)
    # 2 GB at 0.85 x 300, 600, 864 and 307 GB/s
    times_ms = {"L4": 7.843, "A10G": 3.922, "L40S": 2.723, "CPU": 7.664}
    for name, expected in times_ms.items():
        step_s = StepTiming.roofline(ACCELERATORS[name], draft).seconds(1, 0)
        assert 1e3 * step_s == pytest.approx(expected + 1.2, abs=1e-3), name


def test_kv_gets_what_the_weights_leave() -> None:
    # 0.9 x 80 GB less 16.06 GB, in pieces of 131,072 bytes
    assert kv_capacity(H100, LLAMA_8B, 1) == int((72e9 - 16.06e9) / 131_072)
    assert kv_capacity(H100, LLAMA_8B, 1, other_bytes=10e9) == int((72e9 - 26.06e9) / 131_072)
    with pytest.raises(ValueError, match="tensor_parallel_size"):
        kv_capacity(H100, ModelShape.llama_like(70e9), 1)


def test_the_smallest_size_leaves_room_for_kv() -> None:
    sizes = {
        name: smallest_tensor_parallel_size(ACCELERATORS[name], ModelShape.llama_like(70e9))
        for name in ("H100", "H200", "B200")
    }
    assert sizes == {"H100": 4, "H200": 2, "B200": 2}
    with pytest.raises(ValueError, match="num_params"):
        smallest_tensor_parallel_size(H100, ModelShape.llama_like(2e12))


def test_a_profile_covers_every_power_of_two() -> None:
    timing = StepTiming(compute_token_s=1e-3, base_s=4e-3, context_token_s=0.0, overhead_s=0.0)
    assert [point.num_tokens for point in timing.profile(20)] == [1, 2, 4, 8, 16]
    assert [point.seconds for point in timing.profile(20)] == pytest.approx([4e-3, 4e-3, 4e-3, 8e-3, 16e-3])
    assert timing.knee() == 4.0
