import math
import random

import pytest

from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel


def model(*points: tuple[int, float]) -> StepTimeModel:
    return StepTimeModel.from_points(StepTime(num_tokens=n, seconds=seconds) for n, seconds in points)


def test_interpolates_and_extrapolates_by_the_last_slope():
    profile = model((1, 1.0), (3, 2.0), (5, 6.0))
    assert [profile.t(n) for n in (0, 1, 2, 3, 4, 5, 6, 10)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 16.0]
    assert [profile.slope(n) for n in (1, 3, 7)] == [0.5, 2.0, 2.0]


def test_pools_times_that_fall():
    profile = model((1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0))
    assert [profile.t(n) for n in (1, 2, 3, 4, 5)] == [1.0, 2.5, 2.5, 4.0, 5.5]


def test_never_falls():
    profile = model((1, 1.0), (2, 0.9), (4, 1.3), (8, 1.1), (16, 2.0), (32, 1.9), (64, 4.0))
    times = [profile.t(n) for n in range(1, 200)]
    assert times == sorted(times)


@pytest.mark.parametrize(("first", "count"), [(1, 40), (0, 3), (7, 1), (8, 60), (50, 5), (3, 0)])
def test_the_walk_equals_the_search(first, count):
    profile = model((2, 1.0), (8, 2.0), (9, 1.5), (20, 4.0), (33, 4.5))
    assert profile.times(first, count) == pytest.approx([profile.t(n) for n in range(first, first + count)])


def test_the_knee_is_where_half_the_time_is_per_token_work():
    assert model((1, 11.0), (101, 111.0)).knee() == pytest.approx(10.0)  # 10 + n
    assert model((1, 8.0), (16, 8.0), (32, 16.0)).knee() == pytest.approx(16.0)  # max(8, n / 2)
    assert model((1, 1.0), (64, 64.0)).knee() == 1.0
    assert model((1, 1.0), (64, 1.0)).knee() == math.inf


@pytest.mark.parametrize("points", [[], [(1, 1.0)], [(1, 1.0), (1, 2.0)], [(0, 1.0), (1, 1.0)]])
def test_refuses_what_is_no_profile(points):
    with pytest.raises(ValueError, match=r"step time|profile"):
        model(*points)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_refuses_times_that_are_none(seconds):
    with pytest.raises(ValueError, match="step time"):
        model((1, 1.0), (2, seconds))


# --- refitted online ---

KNEED = model((1, 0.020), (16, 0.020), (32, 0.040), (64, 0.080))


def steps(rng: random.Random, count: int) -> list[StepShape]:
    return [StepShape(rng.randint(1, 64), rng.randint(0, 40_000)) for _ in range(count)]


def fitted(truth, shapes: list[StepShape], cost: CostModel | None = None) -> CostModel:
    cost = cost or CostModel(KNEED)
    for shape in shapes:
        cost.observe(shape, truth(shape))
    return cost


def error(cost: CostModel, truth, shapes: list[StepShape]) -> float:
    return max(abs(cost.seconds(shape) / truth(shape) - 1.0) for shape in shapes)


def test_a_single_stair_is_no_knee():
    """A step is 15 % dearer from 65 tokens on, and compute-bound from 256."""
    points = [(n, 1.15 if n > 64 else 1.0) for n in (1, 2, 4, 8, 16, 32, 64, 72, 80, 96, 128, 192)]
    doubled = [point for point in points if point[0].bit_count() == 1]
    rest = [(n, 1.15 * max(1.0, n / 256)) for n in (256, 384, 512, 1024)]
    assert model(*points, *rest).knee() == model(*doubled, *rest).knee() == 256


def test_before_any_step_the_profile_is_all_there_is():
    cost = CostModel(KNEED)
    assert [cost.seconds(StepShape(n, 0)) for n in (1, 24, 128)] == pytest.approx([0.020, 0.030, 0.160])
    assert cost.knee() == KNEED.knee() == 16


def test_scale_and_context_are_found():
    rng = random.Random(1)

    def truth(shape):
        return 1.5 * KNEED.t(shape.num_tokens) + 1e-6 * shape.num_context_tokens

    cost = fitted(truth, steps(rng, 200))
    assert error(CostModel(KNEED), truth, steps(rng, 50)) > 0.3
    assert error(cost, truth, steps(rng, 50)) < 0.03


def test_it_forgets():
    rng = random.Random(2)
    cost = fitted(lambda shape: KNEED.t(shape.num_tokens), steps(rng, 300))

    def slowed(shape):
        return 2.0 * KNEED.t(shape.num_tokens)

    fitted(slowed, steps(rng, 300), cost)
    assert error(cost, slowed, [StepShape(n, 0) for n in (1, 20, 60)]) < 0.07


def test_a_stall_of_the_machine_is_no_cost_of_tokens():
    rng = random.Random(3)

    def truth(shape):
        return KNEED.t(shape.num_tokens) * rng.uniform(0.97, 1.03)

    cost = fitted(truth, steps(rng, 100))
    before = cost.seconds(StepShape(8, 0))
    cost.observe(StepShape(8, 0), 50 * before)
    cost.observe(StepShape(8, 0), 20 * before)
    assert cost.seconds(StepShape(8, 0)) < 1.02 * before


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_left_out(seconds):
    cost = CostModel(KNEED)
    cost.observe(StepShape(8, 100), seconds)
    assert cost.seconds(StepShape(8, 100)) == 0.020


def test_steps_that_are_all_alike_leave_the_curve_its_shape():
    cost = fitted(lambda _: 0.022, [StepShape(8, 1000)] * 500)
    assert cost.seconds(StepShape(8, 1000)) == pytest.approx(0.022, rel=0.01)
    assert cost.seconds(StepShape(32, 1000)) == pytest.approx(0.044, rel=0.05)


def test_the_slope_beyond_the_profile_is_refitted():
    rng = random.Random(4)
    shapes = [StepShape(rng.randint(1, 2000), 0) for _ in range(200)]

    def truth(shape):
        return KNEED.t(min(64, shape.num_tokens)) + 0.0004 * max(0, shape.num_tokens - 64)

    cost = fitted(truth, shapes)
    assert cost.seconds(StepShape(1064, 0)) == pytest.approx(0.480, rel=0.03)
    assert cost.seconds(StepShape(32, 0)) == pytest.approx(0.040, rel=0.1)


@pytest.mark.parametrize("experts", [None, ExpertShape(num_experts=8, num_active=2)])
@pytest.mark.parametrize("first", [1, 30, 60, 90])
def test_the_walk_equals_single_questions(experts, first):
    rng = random.Random(5)
    cost = fitted(lambda shape: 0.01 + 0.001 * shape.num_tokens, steps(rng, 50), CostModel(KNEED, experts))
    expected = [cost.seconds(StepShape(first + more, 777)) for more in range(11)]
    assert cost.seconds_with(StepShape(first, 777), 10) == pytest.approx(expected)
    assert expected == sorted(expected)


def test_a_mixture_of_experts_reads_more_of_them_with_more_tokens():
    experts = ExpertShape(num_experts=32, num_active=2)
    assert [experts.uniform_share(n) for n in (0, 1, 2)] == pytest.approx([0.0, 1 / 16, 1 - (15 / 16) ** 2])
    flat = model((1, 0.02), (64, 0.0201))  # as profiled where all tokens went to the same experts
    rng = random.Random(6)

    def truth(shape):
        return 0.02 + 0.06 * experts.uniform_share(shape.num_tokens)

    shapes = [StepShape(n, 0) for n in (1, 8, 24, 64)]
    with_term, without = (fitted(truth, steps(rng, 300), CostModel(flat, shape)) for shape in (experts, None))
    assert error(with_term, truth, shapes) < 0.05 < 0.15 < error(without, truth, shapes)


def test_says_when_it_extrapolates():
    cost = CostModel(KNEED)
    assert not cost.is_extrapolating(StepShape(80, 80))
    assert cost.is_extrapolating(StepShape(81, 80))
    assert cost.is_extrapolating(StepShape(80, 81))
    cost.observe(StepShape(200, 5000), 0.3)
    assert not cost.is_extrapolating(StepShape(250, 6250))
    assert cost.is_extrapolating(StepShape(10, 6251))


def test_context_moves_the_knee_up():
    def truth(shape):
        return KNEED.t(shape.num_tokens) + 0.020 * shape.num_context_tokens / 10_000

    rng = random.Random(7)
    cost = fitted(truth, [StepShape(rng.randint(1, 64), rng.choice((0, 10_000))) for _ in range(200)])
    cost.observe(StepShape(8, 10_000), truth(StepShape(8, 10_000)))
    assert cost.knee() == pytest.approx(16, rel=0.1)  # 0.02 + n * 0.00125 from 16 on: n = 16
    cost.observe(StepShape(8, 30_000), truth(StepShape(8, 30_000)))
    assert cost.knee() == pytest.approx(48, rel=0.1)


def test_a_drafter_beside_it_slows_steps_down_and_no_others():
    """What shared memory costs is no cost of plain steps: they are what drafting is compared with."""
    cost = CostModel(KNEED)
    rng = random.Random(3)
    for _ in range(200):
        shape = StepShape(rng.randint(1, 64), 0, is_drafting=rng.random() < 0.7)
        cost.observe(shape, KNEED.t(shape.num_tokens) * (1.4 if shape.is_drafting else 1.0))
    assert cost.seconds(StepShape(8, 0)) == pytest.approx(KNEED.t(8), rel=0.02)
    assert cost.seconds(StepShape(8, 0, is_drafting=True)) == pytest.approx(1.4 * KNEED.t(8), rel=0.02)
    alone, beside = (cost.seconds_with(StepShape(8, 0, is_drafting=flag), 4)[-1] for flag in (False, True))
    assert beside == pytest.approx(1.4 * alone, rel=0.02)


def test_where_drafters_always_work_the_profile_tells_what_steps_take_without():
    cost = CostModel(KNEED)
    for _ in range(200):
        cost.observe(StepShape(8, 0, is_drafting=True), 1.4 * KNEED.t(8))
    assert cost.seconds(StepShape(8, 0)) == pytest.approx(KNEED.t(8), rel=0.1)
    assert cost.seconds(StepShape(8, 0, is_drafting=True)) == pytest.approx(1.4 * KNEED.t(8), rel=0.02)
