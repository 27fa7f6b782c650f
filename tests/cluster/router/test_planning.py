"""The router's slow loop: verifiers that price their own steps, pins, KV pressure, a router that starts anew."""

from __future__ import annotations

import pytest

from fakes.reporting_fleet import COMPUTE_BOUND, MEMORY_BOUND, ROOFLINE, Fleet, names
from fakes.reports import drafter_report
from outrider.cluster.router.fleet import (
    PolicyMode,
    RouteAsk,
    RouterPolicy,
    SwitchPolicy,
    with_changes,
)
from outrider.cluster.router.router import RouterCore
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import DisabledReason, EnabledReason, SpeculationPlan

TABLE = ((1, 2, 5), (4, 8, 3), (9, 64, 0))


class TestVerifiersThatPriceTheirSteps:
    """The plan's length is a bound: below it the verifier decides."""

    def test_who_takes_part_may_draft_as_far_as_the_bounds_go(self):
        fleet = Fleet(MEMORY_BOUND, price=0.3)
        fleet.add(*names(8), acceptance=0.6)
        fleet.add("capped", cap=2)
        fleet.run(5)
        assert fleet.lengths == dict.fromkeys(names(8), 8) | {"capped": 2}
        assert fleet.default_plan == SpeculationPlan(drafter_id="d0", draft_length=8, enabled_reason=EnabledReason.PAYS)
        fleet.drafters["d0"] = drafter_report(max_draft_length=5)
        fleet.second()
        assert set(fleet.lengths.values()) == {5, 2}

    def test_where_nothing_pays_drafters_are_released_after_the_dwell(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.add(*names(64))
        fleet.run(5)
        fleet.price = 1.0  # whatever the profile says
        fleet.second()
        fleet.second()
        assert set(fleet.lengths.values()) == {8}, "the dwell"
        fleet.second()
        assert set(fleet.plans.values()) == {SpeculationPlan(disabled_reason=DisabledReason.DRAFT_QUEUE)}
        assert fleet.default_plan.drafter_id is None

    def test_compute_bound_is_load(self):
        fleet = Fleet(ROOFLINE, price=1.0)
        fleet.add(*names(64))
        fleet.run(8)
        assert set(fleet.reasons.values()) == {"load"}

    def test_a_request_that_is_off_must_be_better_by_a_margin(self):
        """Acceptance is about 0.7: above 0.67, but not by 10 %."""
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.add(*names(20), acceptance=0.7)
        fleet.add("keeps the verifier on", acceptance=1.0)
        fleet.run(20)
        shares = []
        for price in (0.67, 0.95, 0.67):
            fleet.price = price
            fleet.run(10)
            shares.append(sum(length > 0 for length in fleet.lengths.values()))
        assert shares[0] >= 15
        assert shares[1] == 1
        assert shares[2] <= 10

    def test_where_all_guess_badly_it_is_no_matter_of_load(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1, policy=RouterPolicy(probe_every_s=1e6))
        fleet.add(*names(8), acceptance=0.0)
        seen: set[str | None] = set()
        for _ in range(30):
            fleet.second()
            seen |= {*fleet.reasons.values(), fleet.default_plan.disabled_reason}
        assert seen <= {None, "warmup", "low_acceptance"}
        assert set(fleet.reasons.values()) == {"low_acceptance"}

    def test_a_reason_holds_through_the_dwell(self):
        fleet = Fleet(COMPUTE_BOUND, policy=RouterPolicy(switch=SwitchPolicy(on_dwell_s=3.0)))
        fleet.add(*names(8))
        fleet.run(8)
        fleet.points = MEMORY_BOUND
        fleet.run(3)
        assert set(fleet.reasons.values()) == {"load"}
        fleet.second()
        assert set(fleet.reasons.values()) == {None}

    def test_one_that_comes_from_another_verifier_does_as_newcomers_do(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.add("r")
        fleet.run(3)
        fleet.add("moved")
        fleet.plans["moved"] = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
        fleet.tick(0.25)
        assert fleet.lengths == {"r": 8, "moved": 8}

    def test_the_price_parts_the_requests(self):
        fleet = Fleet(MEMORY_BOUND, price=0.55)
        fleet.add(*names(4, "good"), acceptance=0.95)
        fleet.add(*names(4, "poor"), acceptance=0.3)
        fleet.run(12)
        assert {fleet.lengths[request_id] for request_id in names(4, "good")} == {8}
        assert {fleet.reasons[request_id] for request_id in names(4, "poor")} == {"load"}

    def test_a_lesser_request_loses_its_drafts_first_and_an_urgent_one_last(self):
        """Acceptance 0.7 at a price of 0.45, which is 0.9 for the lesser one and 0.225 for the urgent one."""
        fleet = Fleet(MEMORY_BOUND, price=0.45)
        fleet.priorities = {"lesser": 1, "urgent": -1}
        fleet.add("lesser", "plain", "urgent")
        fleet.run(10)
        assert fleet.lengths == {"lesser": 0, "plain": 8, "urgent": 8}
        assert fleet.reasons["lesser"] == "load"
        fleet.price = 0.9
        fleet.run(6)
        assert fleet.lengths == {"lesser": 0, "plain": 0, "urgent": 8}
        fleet.price = 0.2
        fleet.run(6)
        assert 1 <= fleet.lengths["lesser"] <= 4

    @pytest.mark.parametrize(
        ("priority", "inter_token_ms", "keeps"),
        [
            (0, 41.0, {0.2, 0.45, 0.9}),  # slower than the target of 40 ms: urgent
            (0, 40.0, {0.2, 0.45}),
            (0, 20.0, {0.2, 0.45}),
            (0, 19.0, {0.2}),  # it can afford to lose its drafts
            (0, None, {0.2, 0.45}),  # no second token yet
            (-1, 19.0, {0.2, 0.45, 0.9}),
            (1, 41.0, {0.2, 0.45, 0.9}),
            (1, 30.0, {0.2}),
        ],
    )
    def test_who_misses_the_target_keeps_drafts_at_a_price_at_which_who_exceeds_it_by_far_loses_them(
        self, priority: int, inter_token_ms: float | None, keeps: set[float]
    ):
        """Acceptance 0.7, as above; beside one without a target, whose figure then says nothing."""
        kept: dict[str, set[float]] = {"aims": set(), "plain": set()}
        for price in (0.2, 0.45, 0.9):
            fleet = Fleet(MEMORY_BOUND, price=price)
            fleet.priorities, fleet.targets_ms = {"aims": priority}, {"aims": 40.0}
            fleet.inter_token_ms = {"plain": 1e6} | ({} if inter_token_ms is None else {"aims": inter_token_ms})
            fleet.add(*kept)
            fleet.add("keeps the verifier on", acceptance=1.0)
            fleet.run(12)
            for request_id in kept:
                kept[request_id] |= {price} if fleet.lengths[request_id] else set()
        assert kept == {"aims": keeps, "plain": {0.2, 0.45}}

    def test_back_within_a_second_of_the_loads_end(self):
        fleet = Fleet(ROOFLINE, price=0.1)
        fleet.add(*names(64))
        fleet.run(5)
        fleet.price = 1.0
        fleet.run(5)
        assert set(fleet.lengths.values()) == {0}
        fleet.drop(*names(63))
        fleet.price = 0.1
        for _ in range(4):
            fleet.tick(0.25)
        assert fleet.lengths == {"r63": 8}

    @pytest.mark.parametrize(("points", "reason"), [(MEMORY_BOUND, "draft_queue"), (ROOFLINE, "load")])
    def test_an_old_price_holds_at_the_same_load_but_is_tried_again(self, points: tuple[StepTime, ...], reason: str):
        fleet = Fleet(points, price=0.1)
        fleet.add("first")
        fleet.run(3)
        fleet.add(*names(100))
        fleet.price = 1.0
        fleet.run(6)
        assert set(fleet.reasons.values()) == {reason}
        lengths = []
        for _ in range(80):
            fleet.tick(0.25)
            lengths.append(max(fleet.lengths.values()))
        assert set(lengths) == {0, fleet.core.policy.probe_length}
        assert 0 < sum(length > 0 for length in lengths) <= 14
        fleet.price = 0.1
        for _ in range(48):
            fleet.tick(0.25)
        assert set(fleet.lengths.values()) == {8}

    @pytest.mark.parametrize(
        ("switch", "fewest", "most"),
        [(SwitchPolicy(), 0, 4), (SwitchPolicy(on_gain=1.0, on_dwell_s=0.0, off_dwell_s=0.0), 8, 240)],
    )
    def test_a_price_about_the_acceptance_does_not_flap(self, switch: SwitchPolicy, fewest: int, most: int):
        """A minute of reports; without hysteresis it would."""
        fleet = Fleet(MEMORY_BOUND, price=0.1, policy=RouterPolicy(switch=switch))
        fleet.add(*names(9), acceptance=0.6)
        fleet.run(20)
        toggles = dict.fromkeys(fleet.plans, 0)
        for _ in range(240):
            fleet.price = fleet.rng.uniform(0.45, 0.75)
            before = fleet.lengths
            fleet.tick(0.25)
            for request_id in toggles:
                toggles[request_id] += (fleet.lengths[request_id] > 0) != (before[request_id] > 0)
        assert fewest <= sorted(toggles.values())[4] <= most

    def test_an_idle_verifier_is_not_held_to_the_price_of_its_last_load(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.add(*names(64))
        fleet.run(3)
        fleet.price = 1.0
        fleet.run(6)
        assert price_of(fleet) == 1.0
        fleet.drop(*names(64))
        fleet.run(2)
        assert fleet.default_plan.draft_length == 8
        assert price_of(fleet) < 0.2

    def test_without_a_profile_its_price_is_enough(self):
        fleet = Fleet((), price=0.2)
        fleet.add("r")
        fleet.run(3)
        assert fleet.lengths == {"r": 8}

    def test_a_pool_that_costs_something_is_not_asked_for_what_brings_nothing(self):
        fleet = Fleet(MEMORY_BOUND, price=0.0, policy=RouterPolicy(probe_every_s=1e6))
        fleet.add("hopeless", acceptance=0.0)
        fleet.add("good", acceptance=0.9)
        fleet.run(20)
        assert fleet.reasons["hopeless"] == "low_acceptance"


def price_of(fleet: Fleet) -> float | None:
    (state,) = fleet.core.snapshot(fleet.now_s).verifiers
    return state.price


@pytest.mark.parametrize("price", [None, 0.1])
class TestKvPressure:
    """Acceptance 0.7: survivals 0.7, 0.49, 0.34, …"""

    @pytest.mark.parametrize(("kv_usage", "longest"), [(0.9, 8), (0.94, 4), (0.96, 1)])
    def test_drafts_get_short_as_the_pool_fills(self, price: float | None, kv_usage: float, longest: int):
        fleet = Fleet(MEMORY_BOUND, price=price)
        fleet.add(*names(8))
        fleet.run(5)
        fleet.kv_usage = kv_usage
        fleet.run(5)
        assert 1 <= max(fleet.lengths.values()) <= longest
        reasons = {plan.enabled_reason for plan in fleet.plans.values() if plan.draft_length > 1}
        assert reasons == {0.9: {"pays"}, 0.94: {"kv_pressure"}, 0.96: set()}[kv_usage]
        if kv_usage <= 0.9:
            assert min(fleet.lengths.values()) > 2

    def test_none_where_it_is_full(self, price: float | None):
        fleet = Fleet(MEMORY_BOUND, price=price)
        fleet.add(*names(8))
        fleet.run(5)
        fleet.kv_usage = 0.99
        fleet.run(5)
        assert set(fleet.reasons.values()) == {"load"}
        fleet.kv_usage = 0.5
        fleet.run(3)
        assert min(fleet.lengths.values()) > 2

    def test_the_operator_says_from_where(self, price: float | None):
        fleet = Fleet(MEMORY_BOUND, price=price, policy=RouterPolicy(kv_pressure_from=1.0))
        fleet.add(*names(8))
        fleet.kv_usage = 1.0
        fleet.run(5)
        assert min(fleet.lengths.values()) > 2


def pinned(length: int) -> SpeculationPlan:
    return SpeculationPlan(drafter_id="d0", draft_length=length, enabled_reason=EnabledReason.PINNED, is_pinned=True)


class TestPins:
    def fleet(self, num_requests: int, **policy: object) -> Fleet:
        fleet = Fleet(COMPUTE_BOUND, price=1.0, policy=with_changes(RouterPolicy(), policy))
        fleet.add(*names(num_requests))
        return fleet.run(2)

    @pytest.mark.parametrize(
        ("num_requests", "length"), [(1, 5), (2, 5), (3, 5), (4, 3), (8, 3), (9, 0), (64, 0), (70, 0)]
    )
    def test_vllms_table_goes_by_the_running_requests(self, num_requests: int, length: int):
        fleet = self.fleet(num_requests, draft_length_by_batch_size=TABLE)
        assert set(fleet.lengths.values()) == {length}
        assert set(fleet.reasons.values()) == {None if length else "load"}
        assert {plan.is_pinned for plan in (*fleet.plans.values(), fleet.default_plan)} == {length > 0}

    def test_the_table_yields_to_bounds_and_opting_out(self):
        fleet = self.fleet(1, draft_length_by_batch_size=TABLE, max_draft_length=4)
        fleet.add("capped", cap=1)
        fleet.add("out", cap=0)
        fleet.second()
        assert fleet.lengths == {"r0": 4, "capped": 1, "out": 0}
        assert fleet.reasons["out"] == "request_opt_out"

    def test_a_fixed_length_whatever_it_costs(self):
        fleet = self.fleet(20, mode="always", max_draft_length=3, draft_length_by_batch_size=TABLE)
        assert set(fleet.plans.values()) == {pinned(3)}

    def test_off_is_off_whatever_the_table_says(self):
        assert set(self.fleet(1, mode="off", draft_length_by_batch_size=TABLE).reasons.values()) == {"config"}

    def test_new_and_waiting_requests_are_pinned_too(self):
        fleet = self.fleet(2, mode="always", max_draft_length=3)
        fleet.second(num_waiting=1)
        assert fleet.plans["r1"].is_pinned
        ask = RouteAsk(request_id="x", num_prompt_tokens=1, num_speculative_tokens=2)
        assert fleet.core.route(ask, fleet.now_s).plan == pinned(2)

    def test_unpinned_by_a_change_of_policy(self):
        fleet = self.fleet(4, mode="always")
        fleet.core.policy = RouterPolicy()
        fleet.run(8)
        assert set(fleet.reasons.values()) == {"load"}
        fleet.core.policy = RouterPolicy(draft_length_by_batch_size=((1, 8, 2),))
        fleet.second()
        assert set(fleet.plans.values()) == {pinned(2)}


class TestRestart:
    """A router that starts anew knows nothing but what the reports say."""

    def restarted(self, fleet: Fleet) -> dict[str, SpeculationPlan]:
        """Replace the router; the verifier reports to it before any drafter does."""
        before = dict(fleet.plans)
        fleet.core = RouterCore(fleet.core.policy)
        fleet.tick(0.25, with_drafters=False)
        return before

    @pytest.mark.parametrize("price", [None, 0.1])
    def test_plans_stay_in_the_first_report_and_after(self, price: float | None):
        fleet = Fleet(MEMORY_BOUND, price=price, drafters=("d0", "d1"))
        fleet.add(*names(20), acceptance=0.95)
        fleet.run(20)
        before = self.restarted(fleet)
        assert fleet.plans == before
        for _ in range(40):
            fleet.tick(0.25)
            assert fleet.plans == before
        assert {plan.drafter_id for plan in before.values()} == {"d0", "d1"}

    def test_on_stays_on_for_a_dwell_though_it_no_longer_pays(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1, policy=RouterPolicy(switch=SwitchPolicy(off_dwell_s=2.0)))
        fleet.add(*names(8))
        fleet.run(3)
        fleet.price = 1.0
        self.restarted(fleet)
        for _ in range(7):
            fleet.tick(0.25)
            assert set(fleet.lengths.values()) == {8}
        fleet.run(2)
        assert set(fleet.lengths.values()) == {0}

    def test_off_stays_off_for_a_dwell_though_it_pays(self):
        fleet = Fleet(COMPUTE_BOUND, policy=RouterPolicy(switch=SwitchPolicy(on_dwell_s=1.0)))
        fleet.add(*names(8))
        fleet.run(8)
        fleet.points = MEMORY_BOUND
        self.restarted(fleet)
        for _ in range(3):
            fleet.tick(0.25)
            assert set(fleet.lengths.values()) == {0}
        fleet.run(2)
        assert min(fleet.lengths.values()) > 0

    def test_one_that_is_off_alone_stays_off_alone(self):
        fleet = Fleet(MEMORY_BOUND, price=0.3, policy=RouterPolicy(probe_every_s=1e6))
        fleet.add(*names(4), acceptance=0.9)
        fleet.add("hopeless", acceptance=0.0)
        fleet.run(20)
        assert fleet.lengths["hopeless"] == 0
        self.restarted(fleet)
        for _ in range(80):
            assert fleet.lengths == dict.fromkeys(names(4), 8) | {"hopeless": 0}
            fleet.tick(0.25)
        assert fleet.reasons["hopeless"] == "low_acceptance", "its counters say so since its start"

    def test_a_drafter_that_never_reports_is_believed_in_for_a_while_only(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.add("r")
        fleet.run(3)
        self.restarted(fleet)
        for seconds in (1.0, 1.0, 1.0):
            assert fleet.lengths == {"r": 8}
            fleet.tick(seconds, with_drafters=False)
        fleet.tick(1.0, with_drafters=False)
        assert fleet.reasons == {"r": "drafter_unavailable"}

    def test_a_drafter_that_leaves_meanwhile_is_not_believed_in(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.add("r")
        fleet.run(3)
        self.restarted(fleet)
        fleet.core.remove("d0")
        fleet.tick(0.25, with_drafters=False)
        assert fleet.reasons == {"r": "drafter_unavailable"}


class TestDrafters:
    def test_a_slow_link_gets_fewer_requests(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1, drafters=("near", "far"))
        fleet.round_trips_s = {"near": 0.004, "far": 0.012}
        fleet.add(*names(40))
        fleet.run(3)
        chosen = [plan.drafter_id for plan in fleet.plans.values()]
        assert 28 <= chosen.count("near") <= 32

    def test_a_link_that_was_never_used_is_tried(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1, drafters=("d0", "d1"))
        fleet.round_trips_s = {"d0": 0.005}
        fleet.add(*names(10))
        fleet.run(3)
        assert [plan.drafter_id for plan in fleet.plans.values()].count("d1") == 5

    def test_a_crowded_drafter_hands_requests_over_one_by_one(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1, drafters=("d0", "d1"), policy=RouterPolicy(max_queue_depth=8))
        fleet.drafters["d1"] = drafter_report("d1", num_sessions=1000)
        fleet.add(*names(10))
        fleet.run(3)
        assert {plan.drafter_id for plan in fleet.plans.values()} == {"d0"}
        fleet.drafters["d0"] = drafter_report("d0", queue_depth=9)
        moved = []
        for _ in range(3):
            fleet.second()
            moved.append([plan.drafter_id for plan in fleet.plans.values()].count("d1"))
        assert moved == [1, 2, 3]
        fleet.drafters["d1"] = drafter_report("d1", queue_depth=9)
        fleet.second()
        assert [plan.drafter_id for plan in fleet.plans.values()].count("d1") == 3, "nowhere to go"
        assert min(fleet.lengths.values()) == 8


def test_a_plan_is_not_sent_again_for_another_reason_alone():
    """At this price no position pays, for less than a dwell: the bound stays, the reason does not."""
    fleet = Fleet(MEMORY_BOUND, price=0.1)
    fleet.add(*names(4))
    fleet.run(5)
    assert fleet.directive is not None
    assert not fleet.directive.plans
    fleet.price = 1.0
    fleet.second()
    assert not fleet.directive.plans
    counts = {(item.decision, item.reason): item.count for item in fleet.core.snapshot(fleet.now_s).decisions}
    assert counts["on", "dwell"] == 4


def test_every_plan_has_a_reason_and_those_without_drafts_no_drafter():
    reasons: set[str] = set()
    modes = [RouterPolicy(mode=mode) for mode in PolicyMode]
    for policy in (*modes, RouterPolicy(draft_length_by_batch_size=TABLE)):
        fleet = Fleet(ROOFLINE, policy=policy, price=0.5)
        fleet.add(*names(10), acceptance=0.9)
        fleet.add(*names(10, "poor"), acceptance=0.02)
        fleet.add("out", cap=0)
        for second in range(30):
            fleet.price = 1.0 if 10 < second < 20 else 0.5
            fleet.second()
            for plan in (*fleet.plans.values(), fleet.default_plan):
                is_on = plan.draft_length > 0
                assert ((plan.drafter_id is not None), (plan.disabled_reason is None)) == (is_on, is_on)
                assert (plan.enabled_reason is not None) == is_on
                reasons.add(str(plan.enabled_reason or plan.disabled_reason))
    on, off = {"pays", "dwell", "probe", "pinned"}, {"low_acceptance", "load", "request_opt_out", "config"}
    assert on | off <= reasons <= {*EnabledReason, *DisabledReason}
