import pytest

from outrider.verifier_service.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.load_levels import LoadLevels
from outrider.verifier_service.step_price import NEVER

COST = CostModel(StepTimeModel((1, 16, 64), (0.020, 0.020, 0.080), 0.00125))


def test_requests_share_a_level_up_to_the_next_power_of_two():
    levels = LoadLevels(COST)
    assert levels.at(4) is levels.at(7)
    assert len({id(levels.at(count)) for count in (0, 1, 2, 4, 8, 64)}) == 6


def test_what_a_load_costs_is_nothing_to_one_request():
    levels = LoadLevels(COST)
    for _ in range(20):
        levels.at(1).price.observe(StepShape(1, 0), 1, [0.7, 0.5])
    alone = levels.at(1).price.price
    for _ in range(200):
        levels.at(64).price.observe(StepShape(64, 0), 64, [0.7, 0.5] * 64)
    assert (levels.at(1).price.price, levels.at(64).price.price) == (alone, NEVER)
    assert alone < 0.5


def test_waits_of_a_new_level_are_at_first_those_of_the_nearest():
    levels = LoadLevels(COST)
    assert not levels.at(1).exposure.is_known
    for count, seconds in ((1, 0.010), (64, 0.300)):
        for _ in range(200):
            levels.at(count).exposure.observe(2, seconds)
    assert levels.at(2).exposure.seconds(2) == pytest.approx(0.010, rel=1e-3)
    assert levels.at(40).exposure.seconds(2) == pytest.approx(0.300, rel=1e-3)
    for _ in range(200):
        levels.at(40).exposure.observe(2, 0.100)
    assert levels.at(64).exposure.seconds(2) == pytest.approx(0.300, rel=1e-3), "from then on it is its own"
