"""The router in virtual time: a simulated verifier follows it and reports every second."""

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fakes.reporting_fleet import COMPUTE_BOUND, MEMORY_BOUND, ROOFLINE, Fleet, names
from fakes.reports import changed, drafter_report, verifier_report
from outrider.cluster.router.fleet import (
    Assignment,
    Directive,
    DrafterReport,
    FleetPause,
    FleetWeights,
    PlacementReason,
    PolicyMode,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
    VerifierRole,
)
from outrider.cluster.router.news import Cursor, FleetNews, NewsAsk, Tally
from outrider.cluster.router.router import RouterCore, StaleEpochError
from outrider.cluster.router.routing import route
from outrider.cluster.router.view import FleetView
from outrider.drafter_service.learning.messages import LearnerStatus
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan
from outrider.verifier_service.messages.wire import decode, encode


class TestLoad:
    @pytest.mark.parametrize(
        ("points", "mode", "price"),
        [
            (MEMORY_BOUND, PolicyMode.AUTO, 0.0),
            (COMPUTE_BOUND, PolicyMode.AUTO, 1.0),
            (MEMORY_BOUND, PolicyMode.ALWAYS, 0.0),
        ],
    )
    def test_operators_see_the_price(self, points, mode, price):
        fleet = Fleet(points, policy=RouterPolicy(mode=mode))
        fleet.add(*names(16))
        fleet.run(10)
        (verifier,) = fleet.core.snapshot(fleet.now_s).verifiers
        assert verifier.price == pytest.approx(price)

    def test_off_when_load_rises_and_on_when_it_falls(self):
        fleet = Fleet(ROOFLINE)
        fleet.add(*names(8))
        fleet.run(5)
        assert min(fleet.lengths.values()) >= 4
        fleet.add(*names(120, "burst"))
        fleet.run(6)
        assert set(fleet.reasons.values()) == {"load"}
        fleet.drop(*names(120, "burst"))
        fleet.second()
        assert set(fleet.lengths.values()) == {0}  # the dwell
        fleet.run(3)
        assert min(fleet.lengths.values()) >= 4
        assert set(fleet.reasons.values()) == {None}

    def test_a_short_burst_does_not_switch_off(self):
        fleet = Fleet(ROOFLINE)
        fleet.add(*names(8))
        fleet.run(5)
        fleet.add(*names(120, "burst"))
        fleet.second()
        fleet.drop(*names(120, "burst"))
        fleet.second()
        assert min(fleet.lengths.values()) >= 4

    def test_slow_drafts_are_draft_queue(self):
        fleet = Fleet(MEMORY_BOUND, price=1.0)  # far below the knee
        fleet.add(*names(4))
        fleet.run(8)
        assert set(fleet.reasons.values()) == {"draft_queue"}
        fleet.price = 0.1
        fleet.run(4)
        assert set(fleet.lengths.values()) == {8}


class TestWishes:
    def test_opt_out_and_caps(self):
        fleet = Fleet(MEMORY_BOUND)
        fleet.add("out", cap=0)
        fleet.add("capped", cap=2)
        fleet.add("free")
        fleet.run(5)
        assert fleet.lengths == {"out": 0, "capped": 2, "free": 8}
        assert fleet.reasons == {"out": "request_opt_out", "capped": None, "free": None}

    def test_caps_hold_while_waiting(self):
        fleet = Fleet(MEMORY_BOUND)
        fleet.add("runs", "waits")
        fleet.add("out", cap=0)
        fleet.add("capped", cap=1)
        for _ in range(3):
            fleet.second(num_waiting=3)
        assert fleet.lengths["waits"] == fleet.default_plan.draft_length > 1
        assert fleet.reasons["out"] == "request_opt_out"
        assert fleet.lengths["capped"] == 1

    def test_operator_pins(self):
        for policy, length, reason in (
            (RouterPolicy(mode=PolicyMode.OFF), 0, "config"),
            (RouterPolicy(max_draft_length=0), 0, "config"),
            (RouterPolicy(mode=PolicyMode.ALWAYS, max_draft_length=3), 3, None),
        ):
            fleet = Fleet(COMPUTE_BOUND, policy=policy)
            fleet.add(*names(8))
            fleet.add("out", cap=0)
            fleet.run(4)
            assert fleet.plans["r0"] == fleet.default_plan
            assert (fleet.lengths["r0"], fleet.reasons["r0"]) == (length, reason)
            assert fleet.reasons["out"] == "request_opt_out"

    def test_what_is_switched_off_is_named_where_there_are_no_drafters_either(self):
        fleet = Fleet(MEMORY_BOUND, drafters=(), policy=RouterPolicy(mode=PolicyMode.OFF))
        fleet.add("r")
        fleet.run(2)
        assert fleet.reasons == {"r": "config"}

    def test_no_profile_is_warmup(self):
        fleet = Fleet(())
        fleet.add("r")
        fleet.run(3)
        assert fleet.reasons == {"r": "warmup"}
        fleet.points = MEMORY_BOUND
        fleet.run(3)
        assert fleet.lengths["r"] > 0


class TestDrafters:
    def test_requests_spread_and_stay(self):
        fleet = Fleet(MEMORY_BOUND, drafters=("d0", "d1"))
        fleet.add(*names(20))
        fleet.run(2)
        first = {request_id: plan.drafter_id for request_id, plan in fleet.plans.items()}
        fleet.drafters["d0"] = drafter_report("d0", num_sessions=50)
        fleet.run(5)
        assert {request_id: plan.drafter_id for request_id, plan in fleet.plans.items()} == first

    def test_a_silent_drafter_is_replaced_and_no_longer_linked(self):
        fleet = Fleet(MEMORY_BOUND, drafters=("d0", "d1"))
        fleet.add(*names(20))
        fleet.run(3)
        assert {plan.drafter_id for plan in fleet.plans.values()} == {"d0", "d1"}
        del fleet.drafters["d0"]  # silent, though the link still looks up
        fleet.run(5)
        assert {plan.drafter_id for plan in fleet.plans.values()} == {"d1"}
        assert [drafter.drafter_id for drafter in fleet.directive.drafters] == ["d1"]

    def test_a_lost_link_counts_at_once(self):
        fleet = Fleet(MEMORY_BOUND, drafters=("d0", "d1"))
        fleet.add(*names(20))
        fleet.run(3)
        fleet.up.discard("d1")
        fleet.second()
        assert {plan.drafter_id for plan in fleet.plans.values()} == {"d0"}
        fleet.up.clear()
        fleet.second()
        assert set(fleet.reasons.values()) == {"drafter_unavailable"}
        assert [drafter.drafter_id for drafter in fleet.directive.drafters] == ["d0", "d1"]
        fleet.up.add("d0")
        fleet.second()
        assert min(fleet.lengths.values()) > 0

    def test_a_draining_drafter_hands_its_requests_over(self):
        fleet = Fleet(MEMORY_BOUND, drafters=("d0", "d1"))
        fleet.add(*names(10))
        fleet.run(3)
        assert {plan.drafter_id for plan in fleet.plans.values()} == {"d0", "d1"}
        fleet.drafters["d0"] = drafter_report("d0", draining=True)
        fleet.drafters["d1"] = drafter_report("d1", num_sessions=40)
        fleet.second()
        assert {plan.drafter_id for plan in fleet.plans.values()} == {"d1"}
        assert min(fleet.lengths.values()) > 0
        assert {drafter.drafter_id for drafter in fleet.directive.drafters} == {"d0", "d1"}, (
            "its link stays until the end"
        )
        ask = RouteAsk(request_id="x", num_prompt_tokens=1)
        assert route(fleet.core.snapshot(fleet.now_s), ask, fleet.now_s).plan.drafter_id == "d1"

    def test_the_last_drafter_that_drains_leaves_requests_without_drafts(self):
        fleet = Fleet(MEMORY_BOUND)
        fleet.add(*names(3))
        fleet.run(2)
        fleet.drafters["d0"] = drafter_report("d0", draining=True)
        fleet.second()
        assert set(fleet.reasons.values()) == {"drafter_unavailable"}

    def test_a_removed_drafter_is_gone_at_once(self):
        fleet = Fleet(MEMORY_BOUND)
        fleet.add("r")
        fleet.run(2)
        fleet.core.remove("d0")
        fleet.core.remove("d0")
        directive = fleet.core.report_verifier(fleet.report(), fleet.now_s)
        assert directive.plans == {"r": SpeculationPlan(disabled_reason=DisabledReason.DRAFTER_UNAVAILABLE)}


class TestReplicas:
    def test_a_silent_replica_expires(self):
        fleet = Fleet()
        fleet.second()
        known = fleet.core.snapshot(fleet.now_s + 3.0)
        assert (len(known.verifiers), len(known.drafters)) == (1, 1)
        left = fleet.core.snapshot(fleet.now_s + 3.1)
        assert (left.verifiers, left.drafters) == ((), ())

    def test_a_removed_verifier_is_gone(self):
        fleet = Fleet()
        fleet.second()
        fleet.core.remove("v0")
        assert fleet.core.snapshot(fleet.now_s).verifiers == ()

    def test_an_old_incarnation_is_refused(self):
        fleet = Fleet()
        fleet.second()
        newer = verifier_report("v0", endpoint="v0:2", epoch=2)
        fleet.core.report_verifier(newer, fleet.now_s)
        with pytest.raises(StaleEpochError, match="'v0' reports as epoch 1"):
            fleet.core.report_verifier(fleet.report(), fleet.now_s)
        assert [state.report.endpoint for state in fleet.core.snapshot(fleet.now_s).verifiers] == ["v0:2"]
        fleet.core.report_drafter(drafter_report(epoch=5), fleet.now_s)
        with pytest.raises(StaleEpochError):
            fleet.core.report_drafter(drafter_report(epoch=4), fleet.now_s)

    def test_a_new_incarnation_forgets_the_old_ones_profile(self):
        fleet = Fleet(MEMORY_BOUND)
        fleet.second()
        report = verifier_report("v0", epoch=2, linked_drafters=("d0",))
        assert fleet.core.report_verifier(report, fleet.now_s).default_plan.disabled_reason == "warmup"

    def test_a_new_incarnation_forgets_the_old_ones_switches(self):
        fleet = Fleet(MEMORY_BOUND, price=1.0)
        fleet.add("old")
        fleet.run(8)
        assert fleet.lengths == {"old": 0}
        fleet.drop("old")
        fleet.add("new")
        fleet.plans["new"] = plan = SpeculationPlan(drafter_id="d0", draft_length=8)
        fleet.price = 0.1
        report = replace(fleet.report(), epoch=2)
        assert fleet.core.report_verifier(report, fleet.now_s).plans.get("new", plan).draft_length == 8

    def test_a_restarted_router_says_everything_again(self):
        fleet = Fleet(MEMORY_BOUND)
        fleet.add(*names(3))
        fleet.run(10)
        assert fleet.directive.plans == {}
        fleet.core = RouterCore()
        fleet.second()
        assert fleet.directive.plans.keys() == set(names(3))

    def test_a_lost_directive_is_said_again(self):
        fleet = Fleet(MEMORY_BOUND)
        fleet.add(*names(3))
        fleet.run(5)
        plan = fleet.plans["r0"]
        fleet.plans["r0"] = SpeculationPlan()
        fleet.second()
        assert fleet.directive.plans == {"r0": plan}


def test_the_same_reports_give_the_same_answers():
    def history(order):
        fleet, answers = Fleet(ROOFLINE, drafters=order), []
        fleet.add(*names(60))
        for _ in range(30):
            fleet.second()
            answers.append((fleet.directive, sorted(fleet.plans.items())))
        return answers

    assert history(("d0", "d1", "d2")) == history(("d2", "d0", "d1"))


def test_messages_cross_the_wire():
    fleet = Fleet(ROOFLINE)
    fleet.add(*names(3))
    fleet.run(2)
    fleet.plans["r0"] = SpeculationPlan()
    report = fleet.report()
    directive = fleet.core.report_verifier(report, fleet.now_s)
    assert decode(encode(report), (VerifierReport,)) == report
    assert decode(encode(directive), (Directive,)) == directive
    assert decode(encode(drafter_report()), (DrafterReport,)) == drafter_report()
    assignment = route(fleet.core.snapshot(fleet.now_s), RouteAsk(request_id="x", num_prompt_tokens=1), fleet.now_s)
    assert decode(encode(assignment), (Assignment,)) == assignment
    fleet.core.hear_gateway(NewsAsk(gateway_id="g", seen=None, tally=Tally(Counter({("on", "pays"): 2}))))
    news = fleet.core.news(None, fleet.now_s)
    assert decode(encode(news), (FleetNews,)) == news


def test_ten_thousand_requests_are_decided_in_time():
    fleet = Fleet(MEMORY_BOUND, drafters=("d0", "d1", "d2", "d3"))
    fleet.add(*names(10_000))
    fleet.run(2)
    begin_s = time.process_time()
    fleet.core.report_verifier(fleet.report(), fleet.now_s)
    assert time.process_time() - begin_s < 5.0  # some 20 times what it takes: catches a quadratic step


# --- what operators see ---


def test_decisions_are_counted_when_they_are_made_and_when_they_change():
    fleet = Fleet(MEMORY_BOUND)
    fleet.run(1)
    view = FleetView()
    view.take(fleet.core.news(None, fleet.now_s))
    for request_id, cap in (("a", None), ("b", 0)):
        ask = RouteAsk(request_id=request_id, num_prompt_tokens=3, num_speculative_tokens=cap)
        plan = view.place(ask, fleet.now_s).plan
        fleet.add(request_id, cap=cap)
        fleet.plans[request_id] = plan
    fleet.core.hear_gateway(view.ask("g"))
    fleet.run(3)  # lengths may move, the decisions stay
    assert decisions(fleet) == {("on", "pays"): 1, ("off", "request_opt_out"): 1}
    fleet.up.clear()
    fleet.run(2)
    assert decisions(fleet) == {("on", "pays"): 1, ("off", "request_opt_out"): 1, ("off", "drafter_unavailable"): 1}
    (placed,) = fleet.core.snapshot(fleet.now_s).placements
    assert (placed.reason, placed.count) == ("only", 2)


def decisions(fleet):
    counts = fleet.core.snapshot(fleet.now_s).decisions
    return {(count.decision, count.reason): count.count for count in counts}


class TestWeights:
    def test_a_verifier_that_starts_late_is_told_where_the_fleets_weights_are(self):
        core = RouterCore(RouterPolicy())
        assert core.report_verifier(verifier_report("a"), 1.0).weights is None
        new = {"weight_version": "7", "weights_taken_s": 5.0}
        assert core.report_verifier(verifier_report("a", **new, weights_folder="/w"), 2.0).weights is None
        told = core.report_verifier(verifier_report("late"), 2.0).weights
        assert told == FleetWeights(version="7", taken_s=5.0, folder="/w")
        assert core.report_verifier(verifier_report("late", **new), 2.1).weights is None

    def test_a_verifier_that_missed_an_order_to_pause_or_to_go_on_is_told(self):
        core = RouterCore()
        assert core.report_verifier(verifier_report("a"), 1.0).pause is None
        paused = {"is_paused": True, "pause_asked_s": 5.0}
        assert core.report_verifier(verifier_report("a", **paused, pause_left_s=9.0), 2.0).pause is None
        told = core.report_verifier(verifier_report("late"), 2.0).pause
        assert told == FleetPause(asked_s=5.0, is_paused=True, lease_left_s=9.0)
        assert core.report_verifier(verifier_report("late", **paused), 2.1).pause is None
        assert core.report_verifier(verifier_report("late", pause_asked_s=6.0), 2.2).pause is None
        told = core.report_verifier(verifier_report("a", **paused), 2.3).pause
        assert told == FleetPause(asked_s=6.0, is_paused=False), "it did not hear that the others go on"

    def test_a_pause_outlives_the_verifiers_that_heard_of_it_but_not_its_lease(self):
        core = RouterCore()
        core.report_verifier(verifier_report("only", is_paused=True, pause_asked_s=5.0, pause_left_s=60.0), 1.0)
        core.remove("only")
        told = core.report_verifier(verifier_report("anew"), 31.0).pause
        assert told == FleetPause(asked_s=5.0, is_paused=True, lease_left_s=30.0)
        assert core.snapshot(31.0).pause == told
        assert core.report_verifier(verifier_report("anew"), 61.0).pause is None, "it runs, as the lease is over"
        waits = verifier_report("anew", pause_asked_s=7.0)
        assert core.report_verifier(waits, 62.0).pause is None
        core.report_verifier(verifier_report("begins", is_paused=True, pause_asked_s=7.0), 62.1)
        assert core.report_verifier(waits, 62.2).pause is None, "it has heard the order, and its requests finish first"
        assert core.report_verifier(verifier_report("late"), 62.3).pause == FleetPause(asked_s=7.0, is_paused=True)

    def test_weights_of_a_trainers_group_cannot_be_taken_later(self):
        core = RouterCore(RouterPolicy())
        core.report_verifier(verifier_report("a", weight_version="7", weights_taken_s=5.0), 1.0)
        assert core.report_verifier(verifier_report("late"), 1.0).weights is None


class TestHandovers:
    def test_a_verifier_is_told_whether_another_one_could_take_its_requests(self):
        core = RouterCore(RouterPolicy())
        assert not core.report_verifier(verifier_report("a"), 1.0).can_migrate, "it is alone"
        assert core.report_verifier(verifier_report("b"), 1.0).can_migrate
        assert core.report_verifier(verifier_report("a", draining=True), 1.1).can_migrate
        assert not core.report_verifier(verifier_report("b", draining=True), 1.1).can_migrate, "the other drains, too"
        assert not core.report_verifier(verifier_report("a", weight_version="2"), 1.2).can_migrate
        core.report_verifier(verifier_report("b", weight_version="2", weights_error="half"), 1.3)
        assert not core.report_verifier(verifier_report("a", weight_version="2"), 1.3).can_migrate

    def test_running_requests_leave_a_verifier_where_others_have_waited_for_a_while(self):
        core = RouterCore(RouterPolicy(move_after_s=1.0))
        crowded = verifier_report("a", num_running=4, num_waiting=2)
        core.report_verifier(verifier_report("b", num_running=1), 0.0)
        answers = {now_s: core.report_verifier(crowded, now_s).migrate_one for now_s in (0.0, 0.9, 1.0, 1.3)}
        assert answers == {0.0: False, 0.9: False, 1.0: True, 1.3: True}
        core.report_verifier(changed(crowded, num_waiting=0), 1.4)
        assert not core.report_verifier(crowded, 1.5).migrate_one, "it counts anew"

    @pytest.mark.parametrize(
        ("figures", "other"),
        [
            ({}, {"draining": True}),
            ({}, {"weight_version": "2"}),
            ({}, {"role": VerifierRole.PREFILL}),
            ({}, {"num_waiting": 1}),
            ({}, {"num_running": 3}),
            ({}, {"kv_usage": 0.6}),
            ({"num_waiting": 0, "kv_usage": 1.0}, {}),
            ({"role": VerifierRole.PREFILL}, {}),
            ({"draining": True}, {}),
        ],
        ids=str,
    )
    def test_they_stay_where_no_other_has_room_or_none_waits(self, figures: dict[str, Any], other: dict[str, Any]):
        core = RouterCore(RouterPolicy(move_after_s=0.0))
        crowded = verifier_report("a", num_running=4, num_waiting=2)
        core.report_verifier(verifier_report("b", num_running=2), 1.0)
        assert core.report_verifier(crowded, 1.0).migrate_one
        core.report_verifier(verifier_report("b", **{"num_running": 2, **other}), 1.1)
        assert not core.report_verifier(changed(crowded, **figures), 1.1).migrate_one

    def test_a_request_that_has_just_come_to_the_other_counts_there(self):
        core = RouterCore(RouterPolicy(move_after_s=0.0))
        crowded = verifier_report("a", num_running=4, num_waiting=2)
        core.report_verifier(verifier_report("b", num_running=2), 1.0)
        assert core.report_verifier(crowded, 1.0).migrate_one
        core.report_verifier(verifier_report("b", num_running=2, num_pending=1), 1.1)
        assert not core.report_verifier(crowded, 1.1).migrate_one


class TestNews:
    """What a gateway that has seen one thing is told next; see test_view for what it makes of it."""

    def told(self, core, seen, now_s=1.0):
        """Return the news, and the names in them."""
        news = core.news(seen, now_s)
        states = (*news.changed.verifiers, *news.changed.drafters)
        return news, {getattr(state.report, "verifier_id", None) or state.report.drafter_id for state in states}

    def core(self, **policy):
        core = RouterCore(RouterPolicy(**policy), epoch=7)
        core.report_verifier(verifier_report("a"), 1.0)
        core.report_verifier(verifier_report("b"), 1.0)
        core.report_drafter(drafter_report("d"), 1.0)
        return core

    def test_only_what_has_changed_is_told(self):
        core = self.core()
        first, names = self.told(core, None)
        assert names == {"a", "b", "d"}
        assert self.told(core, first.cursor)[1] == set()
        core.report_verifier(verifier_report("b", num_running=1), 1.1)
        second, names = self.told(core, first.cursor, 1.1)
        assert (names, second.is_whole) == ({"b"}, False)
        core.report_drafter(drafter_report("d", num_sessions=1), 1.2)
        assert self.told(core, second.cursor, 1.2)[1] == {"d"}
        assert self.told(core, first.cursor, 1.2)[1] == {"b", "d"}

    def test_a_report_that_differs_in_its_time_alone_is_no_news(self):
        core = self.core()
        version = core.version
        for now_s in (1.25, 1.5, 1.75):
            core.report_verifier(verifier_report("a"), now_s)
            core.report_drafter(drafter_report("d"), now_s)
        assert core.version == version

    @pytest.mark.parametrize("leaves", ["is removed", "falls silent"])
    def test_when_one_leaves_all_the_others_are_told(self, leaves):
        core = self.core()
        for now_s in (2.0, 4.5):
            core.report_verifier(verifier_report("a"), now_s)
            core.report_verifier(verifier_report("b"), 2.0)
            core.report_drafter(drafter_report("d"), 2.0)
        seen, now_s = core.news(None, 4.6).cursor, 4.7 if leaves == "is removed" else 5.1
        if leaves == "is removed":
            core.remove("b")
            core.remove("d")
        news, names = self.told(core, seen, now_s)
        assert (names, news.is_whole) == ({"a"}, True)
        assert not self.told(core, news.cursor, now_s)[0].is_whole, "once"

    def test_who_has_heard_another_router_is_told_all(self):
        core = self.core()
        assert self.told(core, Cursor(epoch=6, version=99), 1.1)[1] == {"a", "b", "d"}

    def test_a_new_router_does_not_say_that_it_knows_all_until_all_had_time_to_report(self):
        core = self.core()
        early = core.news(None, 3.9)
        assert not early.is_whole
        core.report_verifier(verifier_report("a"), 3.95)
        core.report_verifier(verifier_report("b"), 3.95)
        late, names = self.told(core, early.cursor, 4.1)
        assert late.is_whole, "who has heard it meanwhile, too"
        assert {"a", "b"} <= names

    def test_what_no_replica_reports_is_told_whole(self):
        core = self.core()
        for change in (
            core.stop_taking,
            lambda: setattr(core, "policy", RouterPolicy(max_draft_length=3)),
            lambda: core.report_learner(LearnerStatus(pool="p"), 1.0),
        ):
            version = core.version
            change()
            assert core.version > version
        news = core.news(None, 1.0)
        assert news.changed.is_stopping
        assert news.policy.max_draft_length == 3
        assert [status.pool for status in news.changed.learners] == ["p"]

    def test_what_gateways_chose_is_counted_together(self):
        core = self.core()
        tally = Tally(Counter({("on", "pays"): 2}), Counter({PlacementReason.PREFIX: 2}))
        core.hear_gateway(NewsAsk(gateway_id="g", seen=None, tally=tally))
        core.hear_gateway(NewsAsk(gateway_id="h", seen=None, tally=tally))
        later = core.news(None, 12.0).changed
        assert [(item.reason, item.count) for item in later.placements] == [("prefix", 4)]
        assert [(item.decision, item.reason, item.count) for item in later.decisions] == [("on", "pays", 4)]
