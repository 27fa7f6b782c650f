from __future__ import annotations

import pytest

from outrider.verifier_service.links.circuit_breaker import BreakerConfig, CircuitBreaker
from outrider.verifier_service.messages.engine import BreakerState

CONFIG = BreakerConfig(failure_threshold=3, open_s=10.0, probe_timeout_s=5.0)


def opened_at(now_s: float) -> CircuitBreaker:
    breaker = CircuitBreaker(CONFIG)
    for _ in range(CONFIG.failure_threshold):
        breaker.record_failure(now_s)
    return breaker


def test_only_consecutive_failures_open_it():
    breaker = CircuitBreaker(CONFIG)
    for _ in range(5):
        breaker.record_failure(0.0)
        breaker.record_failure(0.0)
        breaker.record_success(0.0)
    assert breaker.allow(0.0)
    breaker = opened_at(0.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.allow(9.9)
    assert breaker.wait_s(4.0) == 6.0
    assert breaker.num_opened == 1


def test_half_open_passes_one_probe_at_a_time():
    breaker = opened_at(0.0)
    assert breaker.allow(10.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.allow(10.1)


def test_asking_whether_a_probe_may_pass_takes_no_place():
    breaker = opened_at(0.0)
    assert not breaker.would_allow(9.9)
    assert breaker.would_allow(10.0)
    assert breaker.would_allow(10.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.allow(10.0)
    assert not breaker.would_allow(10.1)


def test_the_probe_decides():
    well, ill = opened_at(0.0), opened_at(0.0)
    assert well.allow(10.0)
    assert ill.allow(10.0)
    well.record_success(11.0)
    ill.record_failure(11.0)
    assert well.state is BreakerState.CLOSED
    assert ill.state is BreakerState.OPEN
    assert not ill.allow(20.9)
    assert ill.allow(21.0)


def test_a_probe_without_outcome_makes_room_for_the_next():
    breaker = opened_at(0.0)
    assert breaker.allow(10.0)
    assert not breaker.allow(14.9)
    assert breaker.allow(15.0)


def test_late_outcomes_of_older_calls_change_nothing_while_open():
    breaker = opened_at(0.0)
    breaker.record_success(1.0)
    breaker.record_failure(2.0)
    assert breaker.state is BreakerState.OPEN
    assert breaker.wait_s(2.0) == 8.0


def test_after_closing_the_count_starts_anew():
    breaker = opened_at(0.0)
    assert breaker.allow(10.0)
    breaker.record_success(10.0)
    breaker.record_failure(10.0)
    breaker.record_failure(10.0)
    assert breaker.state is BreakerState.CLOSED


def test_config_is_checked():
    with pytest.raises(ValueError, match="positive"):
        BreakerConfig(failure_threshold=0)
