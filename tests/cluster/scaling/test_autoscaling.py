"""How large the pools should be: single decisions, and days in virtual time whose trajectories have properties."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.cluster.scaling.autoscaling import (
    DOWNSCALE_SHARE,
    DraftersLoad,
    PoolsLoad,
    PoolsPolicy,
    ReplicaRange,
    VerifiersLoad,
    desired_pools,
    desired_replicas,
)

TARGETS = {"num_requests": 10.0, "kv_usage": 0.8}
POLICY = PoolsPolicy(
    verifiers=ReplicaRange(1, 20),
    drafters=ReplicaRange(0, 10),
    requests_per_verifier=10.0,
    sessions_per_drafter=20.0,
    queue_per_drafter=8.0,
)


@pytest.mark.parametrize(
    ("text", "fewest", "most"), [(2, 2, 2), ("2", 2, 2), ("1:3", 1, 3), (0, 0, 0), ("2:2", 2, 2), ("0:3", 0, 3)]
)
def test_a_range_is_a_number_or_two(text, fewest, most):
    parsed = ReplicaRange.parse(text)
    assert (parsed.fewest, parsed.most, parsed.is_fixed) == (fewest, most, fewest == most)


@pytest.mark.parametrize("text", [-1, "3:1", "-1:3", "a", "1:", ":3", "1:2:3", 1.5, True, None])
def test_a_bad_range_is_refused(text):
    with pytest.raises(ValueError, match="min:max"):
        ReplicaRange.parse(text)


@pytest.mark.parametrize(
    "settings",
    [
        {"requests_per_verifier": 0.0},
        {"kv_usage": -1.0},
        {"sessions_per_drafter": 0.0},
        {"queue_per_drafter": 0.0},
        {"max_late_share": 0.0},
        {"low_price": 0.9},
        {"low_price": -0.1},
        {"growth": 1.0},
    ],
)
def test_a_bad_setting_is_refused_by_name(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        PoolsPolicy(**settings)


@pytest.mark.parametrize(
    ("num_requests", "num_replicas", "desired"),
    [(0, 3, 1), (10, 1, 1), (11, 1, 2), (45, 1, 5), (20, 3, 3), (16, 3, 2), (8, 3, 1)],
)
def test_a_pool_on_its_own_follows_its_load_with_a_margin_downwards(num_requests, num_replicas, desired):
    assert desired_replicas({"num_requests": num_requests}, TARGETS, num_replicas) == desired


def test_the_scarcest_figure_decides():
    assert desired_replicas({"num_requests": 5, "kv_usage": 1.9}, TARGETS, 2) == 3
    assert desired_replicas({"num_requests": 35, "kv_usage": 0.1}, TARGETS, 2) == 4


# --- single decisions ---


def decided(
    verifiers: dict[str, Any], drafters: dict[str, Any] | None = None, drafter_range: ReplicaRange = POLICY.drafters
) -> tuple[Any, ...]:
    """Return both sizes with their reasons, of pools of four and two where nothing else is said."""
    with_knee = {"num_with_knee": 4 if "knee_fill" in verifiers else 0}
    sizes = desired_pools(
        PoolsLoad(
            verifiers=VerifiersLoad(
                **{"num_replicas": 4, "num_ready": 4, "num_requests": 35.0, **with_knee, **verifiers}
            ),
            drafters=DraftersLoad(**{"num_replicas": 2, "num_ready": 2, "num_sessions": 35.0, **(drafters or {})}),
        ),
        dataclasses.replace(POLICY, drafters=drafter_range),
    )
    return (*dataclasses.astuple(sizes.verifiers), *dataclasses.astuple(sizes.drafters))


def test_a_load_that_fits_moves_nothing():
    assert decided({}) == (4, "steady", 2, "steady")


@pytest.mark.parametrize(
    ("load", "wanted", "reason"),
    [
        ({"num_requests": 41.0}, 5, "requests"),
        ({"num_requests": 75.0, "kv_usage": 3.0}, 8, "requests"),
        ({"kv_usage": 3.9}, 5, "kv_cache"),
        ({"num_requests": 500.0}, 20, "requests"),  # Serve's bound
        ({"num_requests": 24.0}, 3, "fits"),
        ({"num_requests": 25.0}, 4, "steady"),  # three would be filled to more than 0.8
        ({"num_requests": 8.0, "knee_fill": 2.0}, 3, "fits"),  # one would be beyond the knee
        ({"num_requests": 2.0, "knee_fill": 4.0}, 2, "fits"),  # a request is not shared
        ({"num_requests": 0.5}, 1, "fits"),  # a mean over time
        ({"num_requests": 8.0, "kv_usage": 1.5}, 3, "fits"),
        ({"num_requests": 0.0, "kv_usage": 0.5}, 1, "idle"),  # what is cached is no load
    ],
)
def test_verifiers_follow_their_load(load, wanted, reason):
    assert decided(load)[:2] == (wanted, reason)


@pytest.mark.parametrize(
    ("load", "wanted", "reason"),
    [
        ({"price": 0.95}, 5, "compute_bound"),
        ({"price": 0.95, "knee_fill": 5.5}, 6, "compute_bound"),
        ({"price": 0.95, "knee_fill": 30.0}, 6, "compute_bound"),  # not all at once
        ({"price": 0.95, "knee_fill": 4.0}, 5, "compute_bound"),
        ({"price": 0.95, "knee_fill": 3.9}, 4, "price"),  # below the knee: not for want of compute
        ({"price": 0.95, "knee_fill": 1.1, "num_requests": 8.0}, 3, "fits"),  # three would be far below it, too
        ({"price": 0.95, "knee_fill": 1.5, "num_with_knee": 1}, 6, "compute_bound"),  # as the others, too
        ({"price": 0.95, "knee_fill": 0.4, "num_with_knee": 1, "num_requests": 8.0}, 4, "price"),
        ({"price": 0.95, "knee_fill": 0.2, "num_with_knee": 1, "num_requests": 8.0}, 2, "fits"),
        ({"price": 0.7, "knee_fill": 0.2, "num_requests": 8.0}, 1, "fits"),
        ({"price": 0.7, "knee_fill": 2.2, "num_requests": 8.0}, 4, "price"),
        ({"price": 0.95, "num_ready": 3}, 4, "compute_bound"),  # one is on its way
        ({"price": 0.95, "num_ready": 3, "num_with_knee": 3, "knee_fill": 9.0}, 5, "compute_bound"),
        ({"price": 0.95, "num_requests": 99.0}, 10, "requests"),
        ({"price": 0.7, "num_requests": 5.0}, 4, "price"),  # fewer would be compute-bound at once
        ({"price": 0.5, "num_requests": 5.0}, 1, "fits"),
        ({"price": 0.95, "num_requests": 0.0}, 1, "idle"),  # a price of the past
    ],
)
def test_a_price_near_one_brings_verifiers(load, wanted, reason):
    assert decided(load)[:2] == (wanted, reason)


@pytest.mark.parametrize(
    ("load", "wanted", "reason"),
    [
        ({"num_sessions": 41.0}, 3, "sessions"),
        ({"queue_depth": 25.0}, 4, "draft_queue"),
        ({"num_sessions": 900.0}, 10, "sessions"),
        ({"num_sessions": 16.0}, 1, "fits"),
        ({"num_sessions": 17.0}, 2, "steady"),
        ({"num_sessions": 0.0}, 1, "fits"),  # never the last one while there are requests
        ({"late_share": 0.2, "queue_depth": 10.0}, 3, "late_drafts"),
        ({"late_share": 0.2, "queue_depth": 2.0}, 2, "late_drafts"),  # nobody waits for another: the link is slow
        ({"late_share": 0.2, "queue_depth": 10.0, "num_ready": 1}, 2, "late_drafts"),  # one is on its way
        ({"late_share": 0.2, "num_sessions": 1.0}, 2, "late_drafts"),  # with fewer they would be later
        ({"late_share": 0.1, "queue_depth": 10.0}, 2, "steady"),
    ],
)
def test_drafters_follow_sessions_queue_and_lateness(load, wanted, reason):
    assert decided({}, load)[2:] == (wanted, reason)


def test_a_price_near_one_sends_drafters_away_and_one_in_between_brings_none():
    assert decided({"price": 0.95})[2:] == (0, "compute_bound")
    assert decided({"price": 0.95}, {"num_sessions": 300.0})[2:] == (0, "compute_bound")
    assert decided({"price": 0.95}, drafter_range=ReplicaRange(1, 3))[2:] == (1, "compute_bound")
    assert decided({"price": 0.95, "num_ready": 3})[2:] == (2, "compute_bound")  # a verifier is on its way
    cold = {"price": 0.95, "knee_fill": 0.3}
    assert decided(cold)[2:] == (2, "steady")  # they may pay once drafters are warm
    assert decided(cold, {"num_sessions": 300.0})[2:] == (2, "price")  # more of them would not pay either
    assert decided(cold, {"num_sessions": 16.0})[2:] == (1, "fits")
    assert decided(cold, {"late_share": 0.2, "queue_depth": 12.0})[2:] == (2, "late_drafts")
    assert decided(cold, {"late_share": 0.2, "queue_depth": 25.0})[2:] == (4, "draft_queue")  # drafters are short
    late = {"late_share": 0.2, "queue_depth": 10.0}
    assert decided({"price": 0.7}, late)[2:] == (2, "late_drafts")
    gone = {"num_replicas": 0, "num_ready": 0, "num_sessions": 0.0}
    assert decided({"price": 0.7, "num_undrafted": 35.0}, gone)[2:] == (0, "price")
    filled = {"price": 0.3, "num_undrafted": 35.0, "knee_fill": 4.0}
    assert decided(filled, gone)[2:] == (0, "price"), "a price that fell since nobody drafts"
    assert decided({**filled, "knee_fill": 3.9}, gone)[2:] == (2, "sessions")


def test_a_cold_drafter_that_does_not_pay_for_a_single_stream_brings_no_verifier_and_stays():
    """As seen on the first day that was recorded."""
    alone = {"num_replicas": 1, "num_ready": 1}
    verifier = {**alone, "num_requests": 1.0, "price": 1.0}
    drafter = {**alone, "num_sessions": 1.0}
    assert decided({**verifier, "knee_fill": 0.09, "num_with_knee": 1}, drafter) == (1, "price", 1, "steady")
    assert decided(verifier, drafter) == (2, "compute_bound", 0, "compute_bound"), "by the price alone"


def test_drafters_go_when_idle_and_come_back_for_those_who_lack_them():
    gone = {"num_replicas": 0, "num_ready": 0, "num_sessions": 0.0}
    assert decided({"num_requests": 0.0}, {"num_sessions": 3.0})[2:] == (0, "idle")
    assert decided({"num_requests": 0.0}, gone)[2:] == (0, "idle")
    assert decided({"num_undrafted": 1.0}, gone)[2:] == (1, "sessions")
    assert decided({"num_undrafted": 35.0, "price": 0.4}, gone)[2:] == (2, "sessions")
    assert decided({"num_undrafted": 0.0}, gone)[2:] == (0, "steady")  # nobody wants drafts


def test_pools_that_say_nothing_are_left_alone():
    assert decided({"num_ready": 0, "num_requests": 0.0}) == (4, "silent", 2, "silent")
    assert decided({}, {"num_ready": 0, "num_sessions": 0.0})[2:] == (2, "silent")
    assert decided({"num_requests": 99.0}, {"num_ready": 0, "num_sessions": 0.0})[:2] == (10, "requests")


def test_drafters_that_start_are_awaited_unless_verifiers_need_their_accelerators():
    not_up = {"num_ready": 0, "num_sessions": 0.0}
    assert decided({"num_requests": 0.0}, not_up)[2:] == (2, "silent")
    assert decided({"num_requests": 0.0, "price": 0.95}, not_up)[2:] == (2, "silent")
    assert decided({"price": 0.95}, not_up)[2:] == (0, "compute_bound")


# --- days ---


@dataclass(frozen=True)
class Machine:
    """A verifier's step over n tokens takes max(floor, fixed + per_token · n), in units of its shortest step."""

    fixed: float
    per_token: float
    floor: float = 1.0

    def price(self, num_tokens: float) -> float:
        """Return G · dt/dn where each request commits what it computes."""
        seconds = self.fixed + self.per_token * num_tokens
        return num_tokens * self.per_token / seconds if seconds > self.floor else 0.0

    @property
    def knee(self) -> float:
        return max(self.fixed, self.floor) / self.per_token


ROOFLINE = Machine(fixed=0.0, per_token=0.125)  # a price of 0 up to 8 requests, of 1 beyond
LINEAR = Machine(fixed=1.0, per_token=0.01)


@dataclass
class Delayed:
    """A pool as Serve scales it: a decision counts when it has stood for a delay, replicas take time to start."""

    num_replicas: int
    up_delay: int = 1
    down_delay: int = 6
    start_time: int = 3
    num_ready: int = 0
    stood: int = 0
    num_changes: int = 0
    num_turns: int = 0  # changes that undo the direction of the one before

    def __post_init__(self) -> None:
        self.num_ready = self.num_replicas
        self._starting: list[int] = []
        self._was_growing = True

    def follow(self, desired: int) -> None:
        """Take in the policy's answer at one moment, and let a moment pass."""
        direction = (desired > self.num_replicas) - (desired < self.num_replicas)
        self.stood = 0 if direction == 0 else (self.stood + direction if self.stood * direction >= 0 else direction)
        if self.stood >= self.up_delay or self.stood <= -self.down_delay:
            self._resize(desired)
        self._starting = [left - 1 for left in self._starting]
        self.num_ready = min(self.num_replicas, self.num_ready + sum(left == 0 for left in self._starting))
        self._starting = [left for left in self._starting if left > 0]

    def _resize(self, desired: int) -> None:
        self._starting += [self.start_time] * max(0, desired - self.num_replicas)
        is_growing = desired > self.num_replicas
        self.num_turns += is_growing != self._was_growing
        self.num_replicas, self.stood, self._was_growing = desired, 0, is_growing
        self.num_ready = min(self.num_ready, desired)
        self.num_changes += 1


@dataclass(frozen=True)
class Moment:
    num_requests: float
    num_verifiers: int
    num_drafters: int
    price: float


def lived(
    day: Callable[[int], float], num_moments: int, machine: Machine = LINEAR, policy: PoolsPolicy = POLICY
) -> tuple[list[Moment], Delayed, Delayed]:
    """Live through a day of so many requests at once at every moment, the pools following the policy."""
    verifiers, drafters = Delayed(policy.verifiers.fewest), Delayed(policy.drafters.fewest)
    moments = []
    for now in range(num_moments):
        num_requests = day(now)
        each = num_requests / verifiers.num_ready
        price = machine.price(each)
        num_speculating = num_requests if price < 0.8 else 0.0
        load = PoolsLoad(
            verifiers=VerifiersLoad(
                num_replicas=verifiers.num_replicas,
                num_ready=verifiers.num_ready,
                num_requests=num_requests,
                kv_usage=num_requests / 20,
                num_with_knee=verifiers.num_ready,
                knee_fill=num_requests / machine.knee,
                price=price,
                num_undrafted=0.0 if drafters.num_ready else num_speculating,
            ),
            drafters=DraftersLoad(
                num_replicas=drafters.num_replicas,
                num_ready=drafters.num_ready,
                num_sessions=num_speculating if drafters.num_ready else 0.0,
                queue_depth=num_speculating / 5 if drafters.num_ready else 0.0,
            ),
        )
        sizes = desired_pools(load, policy)
        verifiers.follow(sizes.verifiers.num_replicas)
        drafters.follow(sizes.drafters.num_replicas)
        moments.append(Moment(num_requests, verifiers.num_replicas, drafters.num_replicas, price))
    return moments, verifiers, drafters


def working_day(now: int) -> float:
    """Return the requests of a day of 240 moments: night, a ramp, a plateau with a wobble, a burst, night."""
    if now < 40 or now >= 200:
        return 0.0
    if now < 80:
        return 3.0 * (now - 40)
    burst = 60.0 if 120 <= now < 150 else 0.0
    return 120.0 + burst + 6.0 * math.sin(now)


@pytest.mark.parametrize("machine", [LINEAR, ROOFLINE])
def test_a_working_day_is_followed_without_flapping(machine):
    policy = dataclasses.replace(POLICY, verifiers=ReplicaRange(1, 30))
    moments, verifiers, drafters = lived(working_day, 240, machine, policy)
    assert all(1 <= moment.num_verifiers <= 30 and 0 <= moment.num_drafters <= 10 for moment in moments)
    for now in (100, 115, 145, 195):  # what the load needs is there when it has stood for a while
        need = moments[now].num_requests / 10
        assert need <= moments[now].num_verifiers
        assert moments[now].num_drafters >= moments[now].num_requests / 20
    assert moments[195].num_verifiers <= math.ceil(126 / 10 / DOWNSCALE_SHARE) + 4  # and the burst's are gone again
    assert moments[30].num_drafters == moments[239].num_drafters == 0
    assert moments[30].num_verifiers == moments[239].num_verifiers == 1
    assert verifiers.num_turns <= 1  # up in the morning and for the burst, down from then on
    assert drafters.num_turns <= 1


@pytest.mark.parametrize("share_with_knee", [1.0, 0.25])
@pytest.mark.parametrize("low", [0.3, 0.7])
@pytest.mark.parametrize("threshold", [0.1, 0.4, 0.5, 0.6, 0.8, 1.0])
def test_whatever_the_price_makes_of_a_load_that_stays_the_pools_come_to_rest(threshold, low, share_with_knee):
    for num_filled in (0.2, 0.7, 1.0, 1.6, 2.0, 3.3, 7.7):
        wanted, drafters = 4, 2
        seen = []
        for _ in range(60):
            fill = num_filled / wanted
            verifiers = {
                "num_replicas": wanted,
                "num_ready": wanted,
                "num_with_knee": wanted * share_with_knee,
                "knee_fill": num_filled * share_with_knee,
                "num_requests": 16.0,
                "price": 0.95 if fill >= threshold else low,
            }
            wanted, _, drafters, _ = decided(verifiers, {"num_replicas": drafters, "num_ready": drafters})
            seen.append((wanted, drafters))
        assert len(set(seen[-20:])) == 1, (num_filled, seen[-20:])


def changes_after(moments: list[Moment], now: int) -> int:
    sizes = [(moment.num_verifiers, moment.num_drafters) for moment in moments[now:]]
    return sum(before != after for before, after in itertools.pairwise(sizes))


@pytest.mark.parametrize("machine", [LINEAR, ROOFLINE])
@pytest.mark.parametrize("num_requests", [1, 7, 8, 9, 10, 11, 16, 20, 33, 64, 65, 100, 150, 199])
def test_a_steady_load_comes_to_rest(machine, num_requests):
    """At every load, those at which one replica more turns the price from 1 to 0 included."""
    generous = dataclasses.replace(POLICY, requests_per_verifier=100.0, kv_usage=50.0)
    moments, *_ = lived(lambda _: float(num_requests), 300, machine, generous)
    assert changes_after(moments, 150) == 0
    assert moments[-1].price < POLICY.high_price or moments[-1].num_verifiers == POLICY.verifiers.most


def test_verifiers_grow_beyond_the_knee_and_not_into_the_blue():
    """A hundred requests of eight a knee: 13 verifiers hold them, however long replicas take to start."""
    generous = dataclasses.replace(POLICY, requests_per_verifier=100.0, kv_usage=50.0)
    moments, verifiers, _ = lived(lambda _: 100.0, 200, ROOFLINE, generous)
    assert moments[-1].num_verifiers in (13, 14)
    assert max(moment.num_verifiers for moment in moments) == moments[-1].num_verifiers
    assert verifiers.num_changes <= 8


def test_at_the_most_verifiers_a_compute_bound_service_gives_its_drafters_up_once():
    few = dataclasses.replace(POLICY, verifiers=ReplicaRange(1, 2))
    moments, verifiers, drafters = lived(lambda now: 300.0 if 20 <= now < 150 else 10.0, 250, ROOFLINE, few)
    assert moments[19].num_drafters == 1
    assert {moment.num_drafters for moment in moments[60:150]} == {0}
    assert moments[-1].num_drafters == 1
    assert verifiers.num_changes <= 4
    assert drafters.num_changes <= 5


def test_one_request_now_and_then_keeps_a_drafter_as_long_as_the_delay_says():
    moments, _, drafters = lived(lambda now: float(now % 4 == 0), 120)
    assert drafters.num_changes == 1
    assert {moment.num_drafters for moment in moments} == {1}
    moments, _, drafters = lived(lambda now: float(now % 60 < 5), 120)
    assert [moments[now].num_drafters for now in (4, 59, 64, 119)] == [1, 0, 1, 0]
