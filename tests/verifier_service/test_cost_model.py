import math

import pytest

from outrider.verifier_service.cost_model import StepTimeModel
from outrider.verifier_service.engine_messages import StepTime


def model(*points: tuple[int, float]) -> StepTimeModel:
    return StepTimeModel.from_points(StepTime(num_tokens=n, seconds=seconds) for n, seconds in points)


def test_interpolates_and_extrapolates_by_the_last_slope():
    profile = model((1, 1.0), (3, 2.0), (5, 6.0))
    assert [profile.t(n) for n in (0, 1, 2, 3, 4, 5, 6, 10)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 16.0]
    assert [profile.slope(n) for n in (1, 3, 7)] == [0.5, 2.0, 2.0]


def test_points_may_come_in_any_order_and_repeat():
    assert model((4, 3.0), (1, 1.0), (4, 5.0)) == model((1, 1.0), (4, 4.0))


def test_pools_times_that_fall():
    profile = model((1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0))
    assert [profile.t(n) for n in (1, 2, 3, 4, 5)] == [1.0, 2.5, 2.5, 4.0, 5.5]


def test_a_noisy_end_does_not_look_free():
    profile = model((1, 1.0), (8, 8.0), (16, 17.0), (32, 16.9))
    assert profile.slope(100) == pytest.approx((16.95 - 8) / (24 - 8))


def test_a_profile_that_only_falls_is_flat():
    profile = model((1, 3.0), (2, 2.0), (3, 1.0))
    assert profile.t(1) == profile.t(100) == 2.0
    assert profile.knee() == math.inf


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
