import random

import pytest

from fakes.reporting_fleet import Fleet
from outrider.cluster.router.fleet import RouterPolicy, SwitchPolicy
from outrider.cluster.router.goodput import (
    AcceptanceCounts,
    SpeculationSwitch,
    VerifierMemory,
    judged_tokens,
    observe,
    solo_gain,
    worth_length,
)


def test_a_price_parts_positions_by_hand():
    """0.8, 0.64, 0.512 and 0.41; 0.5 and 0.25: above 0.5 there are three and none, above 0.25 four and one."""
    assert [worth_length(rate, 4, 0.5) for rate in (0.8, 0.5)] == [3, 0]
    assert [worth_length(rate, 4, 0.25) for rate in (0.8, 0.5)] == [4, 1]
    assert worth_length(0.8, 0, 0.1) == 0
    assert solo_gain(0.8, 4, 0.5) == pytest.approx(1 + 0.3 + 0.14 + 0.012)


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
