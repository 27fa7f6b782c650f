import random

import numpy as np
import pytest

from outrider.verifier_service.pricing.cost_model import CostModel, StepShape, StepTimeModel
from outrider.verifier_service.pricing.exposure import DraftDepth, DraftExposure


def exposed(*rounds: tuple[int, float]) -> DraftExposure:
    exposure = DraftExposure()
    for length, seconds in rounds:
        exposure.observe(length, seconds)
    return exposure


def test_rounds_of_one_length_are_taken_for_a_round_trip_of_one_token_more():
    exposure = exposed(*[(4, 0.020)] * 50)
    assert exposure.position_s == pytest.approx(0.004)
    assert exposure.fixed_s == pytest.approx(0.004)


def test_a_wait_that_is_not_seen_again_is_feared_less_and_less():
    exposure = exposed(*[(2, 0.100)] * 20)
    for _ in range(1000):
        exposure.observe_plain()
    assert 0.010 < exposure.seconds(2) < 0.020
    for _ in range(100_000):
        exposure.observe_plain()
    assert exposure.seconds(2) < 0.002
    exposure.observe(2, 0.010)
    assert exposure.seconds(2) < 0.025, "what is seen now counts for more than what was"


def test_lengths_that_vary_tell_the_round_trip_from_the_drafting():
    rng = random.Random(1)
    lengths = [rng.randint(1, 8) for _ in range(200)]
    exposure = exposed(*((length, 0.010 + 0.002 * length) for length in lengths))
    assert exposure.fixed_s == pytest.approx(0.010, rel=0.25)
    assert exposure.position_s == pytest.approx(0.002, rel=0.25)
    assert exposure.seconds(5) == pytest.approx(0.020, rel=0.1)


def test_neither_part_is_negative():
    shorter = exposed(*((length, 0.010 - 0.001 * length) for length in (1, 8) * 30))
    assert shorter.position_s == 0.0
    dearer = exposed(*((length, 0.001 * length * length) for length in (1, 8) * 30))
    assert dearer.fixed_s >= 0.0


def test_it_forgets():
    exposure = exposed(*[(4, 0.100)] * 100, *[(4, 0.0)] * 100)
    assert exposure.seconds(4) < 0.002


FLAT = CostModel(StepTimeModel((1, 64), (0.020, 0.020), 0.0))
BASE = StepShape(1, 0)


def matrix(offers: list[list[float]]) -> np.ndarray:
    """Return offers as rows, with 0 where there is no position."""
    return np.array([[*offer, *[0.0] * (8 - len(offer))] for offer in offers])


def depth_of(exposure: DraftExposure, offers: list[list[float]], price: float = 0.0) -> DraftDepth:
    depth = DraftDepth(FLAT, exposure)
    for _ in range(50):
        depth.observe(BASE, matrix(offers), price)
    return depth


def test_a_step_that_stands_for_eight_counts_as_eight_that_are_alike():
    exposure = exposed(*[(length, 0.002 * length) for length in (1, 8) * 30])
    one_by_one, at_once = DraftDepth(FLAT, exposure), DraftDepth(FLAT, exposure)
    bounds: list[int | None] = []
    for rate in (0.1, 0.9, 0.6, 0.3):
        offers = matrix([[rate**place for place in range(1, 9)]])
        for _ in range(8):
            one_by_one.observe(BASE, offers, 0.0)
        at_once.observe(BASE, offers, 0.0, num_steps=8)
        assert at_once.bound == one_by_one.bound
        bounds.append(at_once.bound)
    assert len(set(bounds)) > 2, "bounds that do not move show nothing"


def test_without_a_wait_any_depth_is_good():
    assert depth_of(exposed((4, 0.0)), [[0.9, 0.1]]).bound is None


def test_nobody_starts_with_long_drafts():
    """Their time is not known yet."""
    assert depth_of(exposed(), [[0.9] * 8]).bound == 2


def test_positions_are_drafted_for_as_long_as_they_bring_more_than_their_time():
    """5 ms a position against 20 ms a token without drafts: the last of these brings too little."""
    exposure = exposed(*((length, 0.005 * length) for length in (1, 2, 3, 4) * 20))
    assert depth_of(exposure, [[0.9, 0.8, 0.6, 0.1]]).bound == 3
    assert depth_of(exposure, [[0.1, 0.05]]).bound == 1, "whether to draft at all is the price's to say"


def test_a_poor_first_position_is_taken_for_a_good_second():
    """What a draft costs at all is paid once."""
    exposure = exposed(*((length, 0.015 + 0.002 * length) for length in (1, 2, 3, 4) * 20))
    assert depth_of(exposure, [[0.5, 0.48]]).bound == 2


def test_what_would_not_be_verified_makes_no_depth():
    exposure = exposed(*((length, 0.001 * length) for length in (1, 2, 3, 4) * 20))
    assert depth_of(exposure, [[0.9, 0.8, 0.3, 0.3]]).bound == 4
    assert depth_of(exposure, [[0.9, 0.8, 0.3, 0.3]], price=0.5).bound == 2


def test_one_request_that_goes_deep_pays_for_all():
    exposure = exposed(*((length, 0.001 * length) for length in (1, 2, 3, 4) * 20))
    assert depth_of(exposure, [[0.1], [0.9, 0.9, 0.9]]).bound == 3


def next_bound(depth: DraftDepth) -> int | None:
    return None if depth.bound is None else depth.next_bound(depth.bound)


def lengths_asked(*, fixed_s: float, level_s: float, first: list[tuple[int, float]], num_steps: int) -> list[int]:
    """Return how long one request's drafts are, four tokens at most, after such first rounds."""
    exposure = exposed(*first)
    depth = DraftDepth(FLAT, exposure)
    lengths: list[int] = []
    for _ in range(num_steps):
        depth.observe(BASE, matrix([[0.6, 0.4, 0.3, 0.2]]), 0.0)
        lengths.append(min(next_bound(depth) or 4, 4))
        exposure.observe(lengths[-1], fixed_s + level_s * lengths[-1])
    return lengths


@pytest.mark.parametrize("length", [1, 2, 3])
def test_drafts_that_were_short_once_do_not_stay_short(length: int):
    """All of one length, they look as if each position took as long as a round trip, which is then never seen."""
    first = [(length, 0.050)] * 100
    trapped = depth_of(exposed(*first), [[0.6, 0.4, 0.3, 0.2]])
    assert trapped.bound == 1
    lengths = lengths_asked(fixed_s=0.050, level_s=0.0, first=first, num_steps=200)
    assert sum(lengths[20:]) / 180 > 3.3


def test_drafts_whose_positions_are_dear_are_seldom_made_longer():
    lengths = lengths_asked(fixed_s=0.0, level_s=0.020, first=[(1, 0.020)] * 100, num_steps=400)
    assert set(lengths) == {1, 2}
    assert 0 < lengths.count(2) < 20


def test_lengths_that_vary_by_themselves_are_not_made_to():
    depth = depth_of(exposed(*((length, 0.005 * length) for length in (2, 3, 4) * 20)), [[0.9, 0.8, 0.6, 0.1]])
    assert next_bound(depth) == depth.bound == 3


def test_nothing_is_varied_before_the_first_draft_or_where_any_length_is_good():
    assert next_bound(depth_of(exposed(), [[0.9] * 8])) == 2
    assert next_bound(depth_of(exposed((4, 0.0)), [[0.9, 0.1]])) is None
