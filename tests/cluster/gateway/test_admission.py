"""Who is admitted, and when the others may come back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import pytest

from fakes.played_fleet import snapshot_of
from outrider.cluster.common.errors import Overloaded
from outrider.cluster.gateway.admission import (
    MAX_RETRY_S,
    MIN_RETRY_S,
    RATE_MEMORY_S,
    START_RETRY_S,
    OwnQueue,
    Turnover,
    queue_limit,
    refusal,
)
from outrider.cluster.router.fleet import FleetSnapshot, RouterPolicy
from support.clock import Clock

POLICY = RouterPolicy()
LIMIT = 100


def ask(snapshot: FleetSnapshot, *, priority: int = 0, age_s: float = 0.0, **own: Any) -> Overloaded | None:
    return refusal(
        snapshot,
        OwnQueue(**own),
        priority=priority,
        max_queued_requests=LIMIT,
        now_s=snapshot.decided_at_s + age_s,
        policy=POLICY,
    )


def sent_to(snapshot: FleetSnapshot, num_assigned: int) -> FleetSnapshot:
    verifiers = tuple(dataclasses.replace(state, num_assigned=num_assigned) for state in snapshot.verifiers)
    return dataclasses.replace(snapshot, verifiers=verifiers)


@pytest.mark.parametrize(
    ("snapshot", "own", "is_admitted"),
    [
        (snapshot_of("v"), {}, True),
        (snapshot_of("v", num_waiting=99), {}, True),
        (snapshot_of("v", num_waiting=100), {}, False),
        (snapshot_of("v", num_running=500, kv_usage=1.0), {}, True),
        (snapshot_of("v", "w", num_waiting=99), {}, True),
        (snapshot_of("v", "w", num_waiting=100), {}, False),
        (sent_to(snapshot_of("v", num_waiting=60), 39), {}, True),
        (sent_to(snapshot_of("v", num_waiting=60), 40), {}, False),
        (snapshot_of("v", num_waiting=60, num_pending=39), {}, True),
        (snapshot_of("v", num_waiting=60, num_pending=40), {}, False),
        (snapshot_of("v"), {"num_waiting": 99}, True),
        (snapshot_of("v"), {"num_waiting": 100}, False),
        (snapshot_of("v", num_waiting=60), {"num_waiting": 60}, True),
        (snapshot_of("v", num_waiting=24, kv_usage=0.96), {}, True),
        (snapshot_of("v", num_waiting=25, kv_usage=0.96), {}, False),
        (snapshot_of("v", num_waiting=25, kv_usage=0.9), {}, True),
        (snapshot_of("v", num_waiting=0, kv_usage=1.0), {"num_waiting": 90}, True),
        (snapshot_of(), {"num_waiting": 1000}, True),
        (snapshot_of("v", num_waiting=100, draining=True), {}, True),
    ],
)
def test_the_queue_has_a_limit_per_live_verifier(snapshot: FleetSnapshot, own: dict[str, Any], is_admitted: bool):
    assert (ask(snapshot, **own) is None) is is_admitted


@pytest.mark.parametrize(
    ("priority", "num_waiting", "is_admitted"),
    [(1, 49, True), (1, 50, False), (1000, 49, True), (0, 99, True), (-1, 124, True), (-1, 125, False)],
)
def test_what_matters_less_is_refused_first(priority: int, num_waiting: int, is_admitted: bool):
    assert (ask(snapshot_of("v", num_waiting=num_waiting), priority=priority) is None) is is_admitted


def test_a_draining_verifier_takes_nothing_so_it_adds_no_room():
    snapshot = snapshot_of("v", "w", num_waiting=100)
    draining = dataclasses.replace(
        snapshot.verifiers[1], report=dataclasses.replace(snapshot.verifiers[1].report, draining=True)
    )
    assert ask(dataclasses.replace(snapshot, verifiers=(snapshot.verifiers[0], draining))) is not None


@pytest.mark.parametrize(
    ("priority", "figures", "most"),
    [
        (0, {}, 100),
        (1, {}, 50),
        (-1, {}, 125),
        (0, {"num_waiting": 1, "kv_usage": 0.96}, 25),
        (0, {"num_waiting": 0, "kv_usage": 1.0}, 100),
    ],
)
def test_what_may_wait_at_one_verifier_is_its_share_of_the_fleets(priority: int, figures: dict[str, Any], most: int):
    (state,) = snapshot_of("v", **figures).verifiers
    assert queue_limit(state, priority=priority, max_queued_requests=LIMIT) == most


def test_loads_of_a_stale_snapshot_mean_nothing_but_the_own_queue_does():
    snapshot, age_s = snapshot_of("v", num_waiting=500), POLICY.stale_snapshot_s + 1
    assert ask(snapshot, age_s=age_s) is None
    assert ask(snapshot, age_s=age_s, num_waiting=100) is not None


@pytest.mark.parametrize(
    ("own", "retry_after_s"),
    [
        ({}, MIN_RETRY_S),
        ({"num_waiting": 5, "begun_per_s": 50.0}, MIN_RETRY_S),
        ({"num_waiting": 60, "begun_per_s": 10.0}, 6.0),
        ({"num_waiting": 900, "begun_per_s": 10.0}, MAX_RETRY_S),
        ({"num_waiting": 5}, START_RETRY_S),
        ({"num_waiting": 5, "watched_s": 8.0}, 8.0),
        ({"num_waiting": 60, "begun_per_s": 10.0, "promised": ((5.0, 30), (9.0, 1), (11.0, 1))}, 9.1),
        ({"num_waiting": 5, "promised": ((START_RETRY_S, LIMIT),)}, 2 * START_RETRY_S),
        ({"promised": ((1.0, 5),)}, MIN_RETRY_S),
    ],
)
def test_come_back_after_the_time_that_the_queue_takes_now(own: dict[str, Any], retry_after_s: float):
    refused = ask(snapshot_of("v", num_waiting=100), **own)
    assert refused is not None
    assert refused.retry_after_s == pytest.approx(retry_after_s)


def begin_one(turnover: Turnover, clock: Clock, *, after_s: float) -> None:
    """Let a request wait so long, and then begin."""
    with turnover.entered() as ticket:
        clock.now_s += after_s
        turnover.begin(ticket)


def test_a_request_waits_until_its_first_token_or_its_end():
    clock = Clock()
    turnover = Turnover(clock)
    with turnover.entered() as first, turnover.entered():
        assert turnover.update().num_waiting == 2
        clock.now_s += 0.5
        turnover.begin(first)
        turnover.begin(first)
        assert turnover.update().num_waiting == 1
        assert turnover.update().begun_per_s == pytest.approx(2.0, rel=0.05)
    assert turnover.update().num_waiting == 0


def test_the_rate_is_the_true_one_from_the_first_seconds_on():
    clock = Clock()
    turnover = Turnover(clock)
    for number in range(2000):
        begin_one(turnover, clock, after_s=0.05)
        if number > 20:
            assert turnover.update().begun_per_s == pytest.approx(20.0, rel=0.1)


def test_time_without_a_queue_says_nothing_and_a_queue_that_stands_does():
    clock = Clock()
    turnover = Turnover(clock)
    for _ in range(100):
        begin_one(turnover, clock, after_s=0.1)
    clock.now_s += 100 * RATE_MEMORY_S
    assert turnover.update().begun_per_s == pytest.approx(10.0, rel=0.1)
    with turnover.entered():
        clock.now_s += 10 * RATE_MEMORY_S
        assert turnover.update().begun_per_s < 0.01


def test_whoever_is_told_to_come_back_is_counted_until_then():
    clock = Clock()
    turnover = Turnover(clock)
    turnover.promise(2.0)
    turnover.promise(4.5)
    turnover.promise(4.6)
    assert turnover.update().promised == ((2.0, 1), (5.0, 2))
    clock.now_s = 2.0
    assert turnover.update().promised == ((3.0, 2),)
    clock.now_s = 5.0
    assert turnover.update().promised == ()


@pytest.mark.parametrize("begin_s", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("step_s", [0.2, 0.5, 1.0, 2.0])
def test_a_burst_whose_clients_keep_their_word_is_served_within_two_repeats(step_s: float, begin_s: float):
    """The openai client repeats a request twice. One request begins every `step_s`; 4 may wait."""
    clock, num_begun = Clock(), 0
    clock.now_s = begin_s
    turnover = Turnover(clock)
    arrivals = [(begin_s, number, 3) for number in range(16)]  # when, who, attempts left
    waiting: list[int] = []
    next_s = begin_s + step_s
    with contextlib.ExitStack() as stack:
        while arrivals or waiting:
            if waiting and (not arrivals or next_s <= min(arrivals)[0]):
                clock.now_s, next_s = next_s, next_s + step_s
                turnover.begin(waiting.pop(0))
                num_begun += 1
                continue
            arrivals.sort()
            clock.now_s, number, num_left = arrivals.pop(0)
            refused = refuse(turnover.update(), max_queued_requests=4)
            if refused is None:
                next_s = next_s if waiting else clock.now_s + step_s
                waiting.append(stack.enter_context(turnover.entered()))
            elif num_left > 1:
                turnover.promise(refused.retry_after_s)
                arrivals.append((clock.now_s + math.ceil(refused.retry_after_s), number, num_left - 1))
    assert num_begun == 16


def refuse(own: OwnQueue, *, max_queued_requests: int) -> Overloaded | None:
    snapshot = snapshot_of("v")
    return refusal(
        snapshot,
        own,
        priority=0,
        max_queued_requests=max_queued_requests,
        now_s=snapshot.decided_at_s,
        policy=POLICY,
    )


def test_before_any_request_has_begun_the_wait_is_known_to_be_as_long_as_it_was():
    clock = Clock()
    turnover = Turnover(clock)
    with turnover.entered():
        clock.now_s += 4.0
        queue = turnover.update()
    assert queue.begun_per_s == 0.0
    assert queue.watched_s == pytest.approx(4.0, rel=0.25)
