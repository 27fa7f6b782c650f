import random

import numpy as np
import pytest

from outrider.verifier_service.messages.engine import NEVER, StepTime
from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.step_price import GRID, StepPrice


def cost_of(*points: tuple[int, float]) -> CostModel:
    return CostModel(StepTimeModel.from_points(StepTime(num_tokens=n, seconds=seconds) for n, seconds in points))


MEMORY_BOUND = ((1, 0.030), (64, 0.0301))
COMPUTE_BOUND = ((1, 0.010), (1024, 10.24))
KNEE_AT_32 = ((1, 0.032), (32, 0.032), (64, 0.064))
STAIRS = ((1, 1.0), (8, 1.0), (9, 2.0), (16, 2.0), (17, 3.0), (24, 3.0))


def as_expected(worths: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return slots whose drafts are worth what history says."""
    return np.array(worths), np.array(worths)


def priced(cost: CostModel, num_requests: int, worths: list[float], num_steps: int = 40, **options) -> StepPrice:
    price = StepPrice(cost)
    for _ in range(num_steps):
        price.observe(StepShape(num_requests, 0), num_requests, *as_expected(worths), **options)
    return price


def chain(rate: float, length: int = 8) -> list[float]:
    return [rate**place for place in range(1, length + 1)]


def test_a_step_that_stands_for_eight_counts_as_eight_that_are_alike():
    one_by_one, at_once = StepPrice(cost_of(*KNEE_AT_32)), StepPrice(cost_of(*KNEE_AT_32))
    prices: list[float] = []
    for rate in (0.3, 0.9, 0.5, 0.2, 0.7):
        slots = as_expected(chain(rate) * 24)
        for _ in range(8):
            one_by_one.observe(StepShape(24, 0), 24, *slots, exposed_s=0.001)
        at_once.observe(StepShape(24, 0), 24, *slots, exposed_s=0.001, num_steps=8)
        assert at_once.value == one_by_one.value
        prices.append(at_once.value)
    assert len(set(prices)) > 2, "prices that do not move show nothing"


def test_admits_the_leading_positions_above_the_price():
    price = priced(cost_of(*KNEE_AT_32), 16, chain(0.8) * 16)
    assert 0.1 < price.value < 0.9
    above, below = price.value + 0.01, price.value - 0.01
    rows = np.array([[above, above, below, below, 0.0], [price.value, 0.0, 0.0, 0.0, 0.0], [0.0] * 5])
    assert price.num_paying(rows).tolist() == [2, 0, 0], "equal is not above"


def test_the_best_of_all_prices_by_trying_them():
    """The winner is the grid's best for steps that are all alike, wherever knee and survivals are."""
    rng = random.Random(1)
    for points in (MEMORY_BOUND, KNEE_AT_32, STAIRS, COMPUTE_BOUND):
        cost = cost_of(*points)
        for num_requests in (1, 3, 7, 20):
            slots = [s for _ in range(num_requests) for s in chain(rng.uniform(0.1, 0.95), 4)]

            def rate(price: float, cost=cost, num_requests=num_requests, slots=slots) -> float:
                admitted = [s for s in slots if s > price]
                seconds = cost.seconds(StepShape(num_requests + len(admitted), 0))
                return (num_requests + sum(admitted)) / seconds

            found = priced(cost, num_requests, slots).value
            assert rate(found) >= max(map(rate, GRID)) * (1 - 2e-3), (points, num_requests)


def test_stairs_are_filled_and_not_climbed():
    """Seven more tokens are free; the eighth would double the step."""
    slots = [0.5 + 0.05 * place for place in range(9)]
    price = priced(cost_of(*STAIRS), 3, slots)
    assert sum(slot > price.value for slot in slots) == 5


def test_waiting_for_drafts_is_a_cost():
    cost = cost_of(*MEMORY_BOUND)
    assert priced(cost, 1, chain(0.5), exposed_s=0.010).value < 0.1
    assert priced(cost, 1, chain(0.5), exposed_s=0.040).value == NEVER


def half_of_them_good(exposed_s: float) -> StepPrice:
    """Return the price where drafts are worth 0.9 or 0.1 once they are there, and 0.5 as long as they are not."""
    price = StepPrice(cost_of(*MEMORY_BOUND))
    for _ in range(40):
        for survival in (0.9, 0.1):
            price.observe(StepShape(1, 0), 1, np.array([survival]), np.array([0.5]), exposed_s=exposed_s)
    return price


def test_drafts_are_waited_for_before_anybody_knows_how_good_they_are():
    """log 1.9 and log 1.1 are 0.37 in the mean; waiting a third of a step costs 0.29, two thirds 0.51."""
    assert half_of_them_good(0.010).value < 0.1, "a price that only the good ones exceed is one that none is asked for"
    assert half_of_them_good(0.020).value == NEVER, "waiting for the good ones alone would pay"


def test_what_was_asked_for_is_verified_only_where_it_pays():
    """Of eight requests' drafts half are right; a verified token costs a sixteenth of a step."""
    cost = cost_of((1, 0.010), (8, 0.010), (16, 0.015), (24, 0.020))
    price = StepPrice(cost)
    for _ in range(40):
        price.observe(StepShape(8, 0), 8, np.array([0.9, 0.1] * 4), np.full(8, 0.5))
    assert 0.1 <= price.value < 0.5


@pytest.mark.parametrize(("points", "can_pay"), [(MEMORY_BOUND, True), (COMPUTE_BOUND, False)])
def test_whether_drafts_could_pay_at_all_does_not_depend_on_the_wait(points: tuple, can_pay: bool):
    heard: list[tuple[float, bool]] = []
    price = StepPrice(cost_of(*points), lambda before, best, pays: (heard.append((best, pays)), best)[1])
    price.observe(StepShape(4, 0), 4, *as_expected(chain(0.9) * 4), exposed_s=10.0)
    assert heard == [(NEVER, can_pay)]


def test_prompts_in_the_step_make_drafts_dear():
    """Their tokens are worth as much as any: with 500 of them a step beyond the knee is better spent on them."""
    cost = cost_of(*KNEE_AT_32)
    price, beside_prompts = StepPrice(cost), StepPrice(cost)
    for _ in range(10):
        price.observe(StepShape(8, 0), 8, *as_expected(chain(0.7) * 8))
        beside_prompts.observe(StepShape(508, 0), 8, *as_expected(chain(0.7) * 8))
    assert price.value < 0.4
    assert beside_prompts.value > 0.95


def test_later_steps_count_more():
    cost = cost_of(*KNEE_AT_32)
    price = priced(cost, 64, chain(0.8) * 64, num_steps=300)
    assert price.value == NEVER
    for _ in range(40):
        price.observe(StepShape(1, 0), 1, *as_expected(chain(0.8)))
    assert price.value < 0.2


def test_one_odd_step_does_not_move_it():
    price = priced(cost_of(*KNEE_AT_32), 4, chain(0.8) * 4, num_steps=100)
    before = price.value
    price.observe(StepShape(200, 0), 64, *as_expected(chain(0.8) * 64))
    assert price.value == pytest.approx(before, abs=0.15)


def test_steps_that_say_nothing_of_drafts_are_left_out():
    price = priced(cost_of(*COMPUTE_BOUND), 8, chain(0.5))
    before = price.value
    for _ in range(100):
        price.observe(StepShape(8, 0), 8, *as_expected([]))
        price.observe(StepShape(8, 0), 0, *as_expected(chain(0.9)))
    assert price.value == before == NEVER
