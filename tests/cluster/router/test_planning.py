"""The router's slow loop: verifiers that price their own steps, pins, KV pressure, a router that starts anew."""

from __future__ import annotations

import pytest

from fakes.reporting_fleet import COMPUTE_BOUND, MEMORY_BOUND, ROOFLINE, Fleet, names
from fakes.reports import drafter_report
from outrider.cluster.router.fleet import (
    PolicyMode,
    RouteAsk,
    RouterPolicy,
    with_changes,
)
from outrider.cluster.router.router import RouterCore
from outrider.cluster.router.routing import route
from outrider.verifier_service.messages.request import DisabledReason, EnabledReason, SpeculationPlan

TABLE = ((1, 2, 5), (4, 8, 3), (9, 64, 0))


class TestThePrice:
    """Who may draft follows from the price; how much, below the plan's bound, the verifier decides."""

    def test_who_may_draft_may_do_so_as_far_as_the_bounds_go(self):
        fleet = Fleet(MEMORY_BOUND, price=0.3)
        fleet.add(*names(8))
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
        fleet.price = 1.0
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

    def test_one_that_comes_from_another_verifier_does_as_newcomers_do(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.add("r")
        fleet.run(3)
        fleet.add("moved")
        fleet.plans["moved"] = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
        fleet.tick(0.25)
        assert fleet.lengths == {"r": 8, "moved": 8}

    def test_a_lesser_request_loses_its_drafts_first(self):
        fleet = Fleet(MEMORY_BOUND, price=0.45)
        fleet.priorities = {"lesser": 1, "urgent": -1}
        fleet.add("lesser", "plain", "urgent")
        kept = []
        for price in (0.45, 0.55, 0.99, 1.0, 0.2):
            fleet.price = price
            fleet.run(6)
            kept.append({request_id for request_id, length in fleet.lengths.items() if length})
        assert kept == [{"lesser", "plain", "urgent"}, {"plain", "urgent"}, {"plain", "urgent"}, set(), {*fleet.plans}]

    @pytest.mark.parametrize(
        ("priority", "inter_token_ms", "keeps"),
        [
            (0, 41.0, True),  # slower than the target of 40 ms
            (0, 20.0, True),
            (0, 19.0, False),  # it can afford to lose its drafts
            (0, None, True),  # no second token yet
            (-1, 19.0, True),
            (1, 41.0, True),
            (1, 30.0, False),
        ],
    )
    def test_who_takes_less_than_half_of_the_target_loses_them_too(
        self, priority: int, inter_token_ms: float | None, keeps: bool
    ):
        """Beside one without a target, whose figure then says nothing."""
        fleet = Fleet(MEMORY_BOUND, price=0.6)
        fleet.priorities, fleet.targets_ms = {"aims": priority}, {"aims": 40.0}
        fleet.inter_token_ms = {"plain": 1e6} | ({} if inter_token_ms is None else {"aims": inter_token_ms})
        fleet.add("aims", "plain")
        fleet.run(6)
        assert fleet.lengths == {"aims": 8 * keeps, "plain": 8}
        assert fleet.reasons["aims"] == (None if keeps else "load")

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

    @pytest.mark.parametrize(
        ("dwells", "fewest", "most"), [({}, 0, 4), ({"on_dwell_s": 0.0, "off_dwell_s": 0.0}, 40, 240)]
    )
    def test_a_price_that_comes_and_goes_does_not_flap(self, dwells: dict[str, float], fewest: int, most: int):
        """A minute of reports; without dwells it would."""
        fleet = Fleet(MEMORY_BOUND, price=0.1, policy=RouterPolicy(**dwells))
        fleet.add("r")
        fleet.run(5)
        num_toggles = 0
        for number in range(240):
            fleet.price = 1.0 if number % 4 else 0.5
            before = fleet.lengths["r"]
            fleet.tick(0.25)
            num_toggles += (fleet.lengths["r"] > 0) != (before > 0)
        assert fewest <= num_toggles <= most

    def test_an_idle_verifier_is_not_held_to_the_price_of_its_last_load(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.add(*names(64))
        fleet.run(3)
        fleet.drop(*names(64))
        fleet.price = 1.0
        fleet.run(6)
        assert fleet.default_plan.draft_length == 8
        assert price_of(fleet) == 1.0, "as it says itself, where nothing was decided by it"

    def test_without_a_profile_its_price_is_enough(self):
        fleet = Fleet((), price=0.2)
        fleet.add("r")
        fleet.run(3)
        assert fleet.lengths == {"r": 8}


def price_of(fleet: Fleet) -> float | None:
    (state,) = fleet.core.snapshot(fleet.now_s).verifiers
    return state.price


class TestKvPressure:
    """From 0.9 of the blocks on the price is at least the pressure: 0.6 at 0.96, 1 at 1."""

    @pytest.mark.parametrize(
        ("kv_usage", "keep"),
        [(0.9, {"lesser", "plain", "urgent"}), (0.96, {"plain", "urgent"}), (1.0, {"urgent"})],
    )
    def test_as_the_pool_fills_lesser_requests_lose_their_drafts_first(self, kv_usage: float, keep: set[str]):
        fleet = Fleet(MEMORY_BOUND, price=0.1)
        fleet.priorities = {"lesser": 1, "urgent": -1}
        fleet.add("lesser", "plain", "urgent")
        fleet.run(5)
        fleet.kv_usage = kv_usage
        fleet.run(5)
        assert {request_id for request_id, length in fleet.lengths.items() if length} == keep
        assert {*fleet.reasons.values()} <= {None, "load"}
        fleet.kv_usage = 0.5
        fleet.run(3)
        assert set(fleet.lengths.values()) == {8}

    def test_the_operator_says_from_where(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1, policy=RouterPolicy(kv_pressure_from=1.0))
        fleet.add(*names(8))
        fleet.kv_usage = 1.0
        fleet.run(5)
        assert set(fleet.lengths.values()) == {8}


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
        assert route(fleet.core.snapshot(fleet.now_s), ask, fleet.now_s, fleet.core.policy).plan == pinned(2)

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
        fleet.add(*names(20))
        fleet.run(20)
        before = self.restarted(fleet)
        assert fleet.plans == before
        for _ in range(40):
            fleet.tick(0.25)
            assert fleet.plans == before
        assert {plan.drafter_id for plan in before.values()} == {"d0", "d1"}

    def test_on_stays_on_for_a_dwell_though_it_no_longer_pays(self):
        fleet = Fleet(MEMORY_BOUND, price=0.1, policy=RouterPolicy(off_dwell_s=2.0))
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
        fleet = Fleet(COMPUTE_BOUND, policy=RouterPolicy(on_dwell_s=1.0))
        fleet.add(*names(8))
        fleet.run(8)
        fleet.points = MEMORY_BOUND
        self.restarted(fleet)
        for _ in range(3):
            fleet.tick(0.25)
            assert set(fleet.lengths.values()) == {0}
        fleet.run(2)
        assert min(fleet.lengths.values()) > 0

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
        fleet.add(*names(40))
        fleet.add("out", cap=0)
        for second in range(30):
            fleet.price = 1.0 if 10 < second < 20 else 0.5
            fleet.second()
            for plan in (*fleet.plans.values(), fleet.default_plan):
                is_on = plan.draft_length > 0
                assert ((plan.drafter_id is not None), (plan.disabled_reason is None)) == (is_on, is_on)
                assert (plan.enabled_reason is not None) == is_on
                reasons.add(str(plan.enabled_reason or plan.disabled_reason))
    assert {*EnabledReason, "load", "request_opt_out", "config"} <= reasons <= {*EnabledReason, *DisabledReason}
