import itertools
import random

import pytest

from fakes.reporting_fleet import Fleet
from outrider.cluster.router.fleet import RouterPolicy, SwitchPolicy
from outrider.cluster.router.goodput import (
    AcceptanceCounts,
    Candidate,
    Quote,
    SpeculationSwitch,
    VerifierMemory,
    allocate,
    allocate_at,
    judged_tokens,
    observe,
    solo_gain,
)
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.pricing.cost_model import StepTimeModel


def profile(times):
    return StepTimeModel.from_points(StepTime(num_tokens=n, seconds=seconds) for n, seconds in times.items())


FLAT = profile({1: 0.03, 1024: 0.03})
LINEAR = profile({1: 0.001, 1024: 1.024})


def expected_committed(acceptance_rate, draft_length):
    """Return the expected tokens of one verification: each position that survives, and one token more."""
    return sum(acceptance_rate**position for position in range(draft_length + 1))


def best_by_trying_everything(candidates, *, num_decoding, step_time, exposed_s):
    def throughput(lengths):
        committed = (
            num_decoding
            - len(lengths)
            + sum(
                expected_committed(candidate.acceptance_rate, length)
                for candidate, length in zip(candidates, lengths, strict=True)
            )
        )
        wait_s = exposed_s if any(lengths) else 0.0
        return committed / (step_time.t(num_decoding + sum(lengths)) + wait_s)

    choices = itertools.product(*(range(candidate.max_length + 1) for candidate in candidates))
    return max(throughput(lengths) for lengths in choices), throughput


@pytest.mark.parametrize("seed", range(60))
def test_allocation_is_as_good_as_trying_everything(seed):
    rng = random.Random(seed)
    candidates = [Candidate(f"r{i}", rng.random(), rng.randint(0, 3)) for i in range(4)]
    times = [1.0]
    for _ in range(24):  # stairs, knees and flats
        times.append(times[-1] + rng.choice([0.0, 0.0, 0.05, 0.2, 0.6]))
    arguments = {
        "num_decoding": rng.randint(4, 8),
        "step_time": profile(dict(enumerate(times, start=1))),
        "exposed_s": rng.choice([0.0, 0.3]),
    }
    allocation = allocate(candidates, **arguments)
    best, throughput = best_by_trying_everything(candidates, **arguments)
    assert throughput([allocation.lengths[candidate.request_id] for candidate in candidates]) == pytest.approx(best)
    assert all(allocation.lengths[candidate.request_id] <= candidate.max_length for candidate in candidates)


def test_the_lowest_acceptance_loses_its_draft_first():
    """Room for four more tokens, then a wall."""
    wall = profile({1: 1.0, 8: 1.0, 9: 9.0})
    rates = {"low": 0.2, "mid": 0.5, "high": 0.9, "no": 0.0}
    candidates = [Candidate(request_id, rate, 4) for request_id, rate in rates.items()]
    allocation = allocate(candidates, num_decoding=4, step_time=wall)
    assert allocation.lengths == {"high": 4, "mid": 0, "low": 0, "no": 0}  # 0.9, .81, .73, .66 all exceed 0.5
    assert 0.5 <= allocation.price <= 0.9**4 + 1e-9
    assert allocation.gain == pytest.approx(1 + sum(0.9**j for j in range(1, 5)) / 4)


def test_looks_beyond_a_stair():
    """The first extra token costs a tile of four: alone it does not pay, together they do."""
    tile = profile({1: 1.0, 2: 1.0, 3: 1.5, 6: 1.5, 7: 9.0})
    allocation = allocate([Candidate("a", 0.95, 4), Candidate("b", 0.95, 4)], num_decoding=2, step_time=tile)
    assert allocation.lengths == {"a": 2, "b": 2}


def test_equal_requests_share_evenly_and_order_does_not_matter():
    candidates = [Candidate(f"r{i}", 0.7, 4) for i in range(10)]
    wall = profile({1: 1.0, 25: 1.0, 26: 99.0})
    allocation = allocate(candidates, num_decoding=10, step_time=wall)
    assert sorted(allocation.lengths.values()) == [1] * 5 + [2] * 5
    assert allocate(candidates[::-1], num_decoding=10, step_time=wall).lengths == allocation.lengths


def test_nothing_is_given_when_nothing_pays():
    allocation = allocate([Candidate("a", 0.6, 8)], num_decoding=10, step_time=LINEAR)
    assert allocation.lengths == {"a": 0}
    assert allocation.gain < 1.0
    assert allocation.price >= 0.6
    assert allocate([], num_decoding=1, step_time=FLAT).gain == 0.0


def test_least_price_bounds_drafts_that_cost_no_time():
    allocation = allocate([Candidate("a", 0.5, 20)], num_decoding=1, step_time=FLAT, min_price=0.05)
    assert allocation.lengths == {"a": 4}  # 0.5^4 = 0.0625, 0.5^5 = 0.031


@pytest.mark.parametrize(("num_decoding", "holds"), [(14, False), (15, True), (20, True), (26, True), (27, False)])
def test_a_quote_is_of_its_own_load(num_decoding, holds):
    assert Quote(0.5, 20).is_of(num_decoding) is holds


def test_a_price_that_is_said_parts_positions_by_hand():
    """0.8, 0.64, 0.512 and 0.41; 0.5 and 0.25: above 0.5 there are three and none, above 0.25 four and one."""
    candidates = [Candidate("a", 0.8, 4), Candidate("b", 0.5, 4)]
    allocation = allocate_at(candidates, 0.5)
    assert (allocation.lengths, allocation.price) == ({"a": 3, "b": 0}, 0.5)
    assert allocation.gain == pytest.approx(1 + 0.3 + 0.14 + 0.012)
    assert allocate_at([*candidates, Candidate("c", 0.5, 4, worth=2.0)], 0.5).lengths == {"a": 3, "b": 0, "c": 1}
    assert allocate_at([Candidate("a", 0.8, 0)], 0.5).gain == 0.0


def test_solo_gain_by_hand():
    assert solo_gain(0.5, 3, 0.1) == pytest.approx(1 + 0.4 + 0.15 + 0.025)
    assert solo_gain(0.5, 3, 0.3) == pytest.approx(1.2)
    assert solo_gain(0.2, 3, 0.5) == pytest.approx(0.7)


def test_a_single_token_draft_shows_every_rejection():
    counts = judged_tokens(
        num_drafts=10, num_draft_tokens=10, num_accepted_tokens=3, expected_rate=0.99, expected_tokens=8
    )
    assert counts == AcceptanceCounts(3, 7)
    assert counts.rate(prior_rate=0.5, prior_tokens=10) == 0.4  # (3 + 5) / 20


def test_no_draft_says_nothing():
    counts = judged_tokens(
        num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0, expected_rate=0.5, expected_tokens=8
    )
    assert counts.rate(prior_rate=0.6, prior_tokens=4) == pytest.approx(0.6)


@pytest.mark.parametrize("true_rate", [0.1, 0.5, 0.8, 0.95])
def test_estimate_finds_the_rate_per_position(true_rate):
    """Drafts of four: accepted ÷ drafted would be far below the true rate."""
    rng, counts = random.Random(1), AcceptanceCounts()
    for _ in range(100):
        accepted = [next((j for j in range(4) if rng.random() >= true_rate), 4) for _ in range(20)]
        rate = counts.rate(prior_rate=0.6, prior_tokens=16)
        news = judged_tokens(
            num_drafts=20,
            num_draft_tokens=80,
            num_accepted_tokens=sum(accepted),
            expected_rate=rate,
            expected_tokens=counts.num_judged + 16,
        )
        counts = counts.plus(news, memory_tokens=2000)
    assert counts.rate(prior_rate=0.6, prior_tokens=16) == pytest.approx(true_rate, abs=0.03)


def test_counters_that_begin_again_are_counted_from_there():
    fleet, memory = Fleet(), VerifierMemory()
    fleet.add("r", cap=1)
    for counters in ([10, 10, 4], [30, 30, 14], [5, 5, 5]):  # 4 of 10, 10 of 20, then 5 of 5
        fleet.counters["r"] = counters
        memory = observe(fleet.report(), memory, RouterPolicy(), 0.0)
    assert memory.requests["r"].counts == memory.pool == AcceptanceCounts(19, 16)


def test_old_outcomes_fade():
    counts = AcceptanceCounts().plus(AcceptanceCounts(1000, 0), memory_tokens=100)
    assert counts == AcceptanceCounts(100, 0)
    for _ in range(5):
        counts = counts.plus(AcceptanceCounts(0, 50), memory_tokens=100)
    assert counts.num_accepted < 20


class TestSwitch:
    POLICY = SwitchPolicy(on_gain=1.1, off_gain=1.0, on_dwell_s=2.0, off_dwell_s=3.0)

    def states(self, is_on, gains):
        switch = SpeculationSwitch(is_on, 0.0)
        for now_s, gain in enumerate(gains):
            switch = switch.after(gain, float(now_s), self.POLICY)
            yield switch.is_on

    def test_goes_on_after_the_dwell(self):
        assert list(self.states(False, [1.2, 1.2, 1.2])) == [False, False, True]

    def test_goes_off_after_its_own_dwell(self):
        assert list(self.states(True, [0.9, 0.9, 0.9, 0.9])) == [True, True, True, False]

    def test_keeps_its_state_between_the_thresholds(self):
        assert not any(self.states(False, [1.05] * 20))
        assert all(self.states(True, [1.05] * 20))

    def test_a_moment_past_the_threshold_starts_the_dwell_again(self):
        assert not any(self.states(False, [1.2, 1.2, 1.05, 1.2, 1.2, 1.05]))
        assert all(self.states(True, [0.9, 0.9, 1.0, 0.9, 0.9, 0.9]))
