"""The profile's batches are judged by the fake runner (tables, positions); its times are of a clock that it moves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from fakes.runner import TimedRunner
from outrider.verifier_service.engine.step_profile import (
    GAPS_PATIENCE_S,
    NUM_REPEATS,
    StepProfile,
    measure_step_profile,
)
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel


def profile_of(runner: TimedRunner, max_tokens: int) -> StepProfile:
    return measure_step_profile(runner, max_tokens, lambda: runner.now_s)


def straight(count: int) -> float:
    return 1e-4 * (10 + count)


@pytest.mark.parametrize(
    ("max_tokens", "num_blocks", "counts"),
    [
        (1, 64, [1]),
        (2, 64, [1, 2]),
        (16, 64, [1, 2, 3, 4, 6, 8, 12, 16]),
        (31, 64, [1, 2, 3, 4, 6, 8, 12, 16]),
        (64, 9, [1, 2, 3, 4, 6, 8]),
        (64, 1, [1]),
    ],
)
def test_counts_double_up_to_the_smaller_limit_with_a_middle_where_the_curve_is_straight(
    max_tokens: int, num_blocks: int, counts: list[int]
):
    times = profile_of(TimedRunner(straight, num_blocks=num_blocks), max_tokens).step_times
    assert [time.num_tokens for time in times] == counts
    assert [time.seconds for time in times] == pytest.approx([straight(count) for count in counts])


def test_a_machine_that_stands_still_most_of_the_time_makes_no_step_slower():
    num_steps = itertools.count()

    def stalled(count: int) -> float:
        return straight(count) + (0.0 if next(num_steps) % 3 == 0 else 0.01)

    times = profile_of(TimedRunner(stalled), 16).step_times
    assert [time.seconds for time in times] == pytest.approx([straight(time.num_tokens) for time in times])


@pytest.mark.parametrize(
    ("curve", "mean_error"),
    [
        (lambda count: 1e-4 * max(1.0, count / 37), 0.003),  # a knee far from any power of two
        (lambda count: 1e-4 * -(-count // 24), 0.04),  # batches are padded to multiples of 24
    ],
    ids=["knee", "stairs"],
)
def test_it_follows_the_curve_where_it_bends(curve: Callable[[int], float], mean_error: float):
    times = profile_of(TimedRunner(curve, num_blocks=256), 256).step_times
    model = StepTimeModel.from_points(times)
    errors = [abs(model.t(count) / curve(count) - 1.0) for count in range(1, 257)]
    assert sum(errors) / len(errors) < mean_error
    doubled = StepTimeModel.from_points(time for time in times if time.num_tokens.bit_count() == 1)
    assert sum(abs(doubled.t(count) / curve(count) - 1.0) for count in range(1, 257)) > 1.4 * sum(errors)
    assert len(times) < 32


def test_a_slow_machine_is_not_measured_for_ever():
    runner = TimedRunner(lambda count: 0.05 * -(-count // 24), num_blocks=256)
    times = profile_of(runner, 256).step_times
    assert [time.num_tokens for time in times if time.num_tokens.bit_count() == 1] == [1, 2, 4, 8, 16, 32, 64]
    doublings_s = (1 + NUM_REPEATS) * sum(0.05 * -(-(1 << power) // 24) for power in range(7))
    slowest_s = (1 + NUM_REPEATS) * 0.15
    assert runner.now_s < doublings_s + GAPS_PATIENCE_S + slowest_s + slowest_s, "the last middle, and the context"


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "sequences", "length"),
    [(64, 64, 4, 64), (50, 64, 5, 48), (1024, 64, 1, 256), (64, 1024, 8, 64)],
)
def test_what_reading_the_context_takes_is_measured(max_model_len: int, num_blocks: int, sequences: int, length: int):
    runner = TimedRunner(straight, context_s=1e-6, max_model_len=max_model_len, num_blocks=num_blocks)
    context = profile_of(runner, 8).context
    assert context is not None
    batch = runner.batches[-1]
    assert batch.context_lengths == [length] * sequences
    blocks = [block_id for table in batch.block_tables for block_id in table]
    assert len(set(blocks)) == len(blocks)
    assert context.num_tokens == sequences * length
    assert context.seconds == pytest.approx(1e-6, rel=0.03), "but for the one position of the others"


def test_from_the_first_step_on_long_contexts_are_dearer():
    runner = TimedRunner(straight, context_s=1e-6)
    profile = profile_of(runner, 8)
    model = StepTimeModel.from_points(profile.step_times)
    long = StepShape(4, 4000)
    assert CostModel(model, context=profile.context).seconds(long) == pytest.approx(straight(4) + 4e-3, rel=0.03)
    assert CostModel(model).seconds(long) == pytest.approx(straight(4), rel=0.03)
