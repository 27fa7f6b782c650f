from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from fakes.priced_bench import ONE_CORE, FarBench, FarDrafts
from outrider.verifier_service.messages.engine import NEVER
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.load_levels import LoadLevels

COST = CostModel(StepTimeModel((1, 16, 64), (0.020, 0.020, 0.080), 0.00125))
SLOTS = np.array([0.7, 0.5])


def test_requests_share_a_level_up_to_the_next_power_of_two():
    levels = LoadLevels(COST)
    assert levels.at(4) is levels.at(7)
    assert len({id(levels.at(count)) for count in (0, 1, 2, 4, 8, 64)}) == 6


def test_what_a_load_costs_is_nothing_to_one_request():
    levels = LoadLevels(COST)
    for _ in range(20):
        levels.at(1).price.observe(StepShape(1, 0), 1, SLOTS, SLOTS)
    alone = levels.at(1).price.value
    for _ in range(200):
        levels.at(64).price.observe(StepShape(64, 0), 64, np.tile(SLOTS, 64), np.tile(SLOTS, 64))
    assert (levels.at(1).price.value, levels.at(64).price.value) == (alone, NEVER)
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


def test_steps_of_a_new_level_take_at_first_what_those_of_the_nearest_do():
    """A machine that is twice as fast as its profile with many requests, and half as fast with one."""
    levels = LoadLevels(deepcopy(COST))

    def seconds() -> tuple[float, float]:
        return levels.at(1).cost.seconds(StepShape(1, 0)), levels.at(64).cost.seconds(StepShape(64, 0))

    for count, took_s in ((1, 0.040), (64, 0.040), (1, 0.040)):
        for _ in range(300):
            levels.at(count).cost.observe(StepShape(count, 0), took_s)
        if count == 64:
            assert seconds() == pytest.approx((0.040, 0.040), rel=0.05), "one request is what it was"
    assert levels.at(32).cost.seconds(StepShape(32, 0)) == pytest.approx(0.020, rel=0.05), "half of 0.040 by profile"
    assert seconds() == pytest.approx((0.040, 0.040), rel=0.05)


def test_how_fast_a_load_ran_is_nothing_to_the_request_after_it():
    """The machine is slower with one request than its profile says, and may be faster with many."""

    def num_drafted_after(speed_under_load: float) -> int:
        share = {1: 1.3, 2: 1.3, 4: 1.3, 8: 1.0}
        true = [
            replace(point, seconds=point.seconds * share.get(point.num_tokens, 1.0 / speed_under_load))
            for point in ONE_CORE
        ]
        drafts = FarDrafts(level_s=0.002, fixed_s=0.003, opening_s=0.01, share_wrong=0.45)
        bench = FarBench(drafts, ONE_CORE, contention=0.2, true=true)
        bench.speed(1, num_requests=24)
        bench.speed(32, num_requests=64)
        num_before = len(drafts.asked)
        bench.speed(1, num_requests=2)
        return sum(drafts.asked[num_before:])

    assert num_drafted_after(1.4) == pytest.approx(num_drafted_after(1.0), rel=0.1)


class Depth(NamedTuple):
    """A depth that is set."""

    bound: int | None
    next: int | None

    def next_bound(self, bound: int) -> int | None:
        return self.next


@pytest.mark.parametrize(
    ("depth", "asked"),
    [
        (Depth(None, None), 3),
        (Depth(4, 6), 3),
        (Depth(3, 5), 5),
        (Depth(1, 2), 2),
        (Depth(1, 1), 1),
        (Depth(3, 9), 6),
    ],
    ids=["any depth", "the price ends it", "the depth ends it", "of one", "no longer", "no more on offer"],
)
def test_where_depth_ends_a_draft_it_may_be_longer_whatever_the_price(depth: Depth, asked: int):
    level = replace(LoadLevels(COST).at(1), depth=depth)
    level.price.value = 0.35
    assert level.ask_lengths(np.array([[0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]]), np.array([6])).tolist() == [asked]
