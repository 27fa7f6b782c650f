"""A gateway's view of the fleet: news of the router, and its own requests until reports include them."""

from __future__ import annotations

import dataclasses

import pytest

from fakes.played_fleet import news_of
from fakes.reports import drafter_report, verifier_report
from outrider.cluster.router.fleet import (
    DrafterState,
    FleetSnapshot,
    RouteAsk,
    RouterPolicy,
    VerifierRole,
    VerifierState,
)
from outrider.cluster.router.news import Cursor
from outrider.cluster.router.routing import NoVerifierError
from outrider.cluster.router.view import FleetView
from outrider.verifier_service.messages.request import SpeculationPlan

NOW_S = 100.0
PLAN = SpeculationPlan(drafter_id="d0", draft_length=4)


def fleet_of(*reports, drafters=(), **fields) -> FleetSnapshot:
    return FleetSnapshot(
        verifiers=tuple(VerifierState(report=report, reported_s=NOW_S, default_plan=PLAN) for report in reports),
        drafters=tuple(DrafterState(report=report, reported_s=NOW_S) for report in drafters),
        decided_at_s=NOW_S,
        **fields,
    )


def verifier(verifier_id, **figures):
    return verifier_report(verifier_id, linked_drafters=("d0", "d1"), **figures)


def view_of(*reports, **fields) -> FleetView:
    view = FleetView()
    view.take(news_of(fleet_of(*reports, **fields)))
    return view


def ask(request_id="r", **fields) -> RouteAsk:
    return RouteAsk(request_id=request_id, num_prompt_tokens=10, **fields)


def send(view, request_id):
    """Place a request and send it; return who verifies and who drafts."""
    assignment = view.place(ask(request_id), NOW_S)
    view.begin(request_id, assignment.verifier_id, assignment.plan.drafter_id)
    return assignment.verifier_id, assignment.plan.drafter_id


def assigned(view) -> dict[str, int]:
    return {state.report.verifier_id: state.num_assigned for state in view.fleet.verifiers}


# --- what the router says ---


def test_what_has_changed_joins_what_is_known_and_what_is_whole_replaces_it():
    view = view_of(verifier("a"), verifier("b"))
    view.take(news_of(fleet_of(verifier("b", num_running=3), verifier("c")), 2, is_whole=False))
    assert [(state.report.verifier_id, state.report.load.num_running) for state in view.fleet.verifiers] == [
        *(("a", 0), ("b", 3), ("c", 0))
    ]
    view.take(news_of(fleet_of(verifier("c")), 3))
    assert [state.report.verifier_id for state in view.fleet.verifiers] == ["c"]


def test_older_news_of_the_same_router_change_nothing_and_those_of_a_new_one_count():
    view = view_of(verifier("a"))
    view.take(news_of(fleet_of(verifier("b")), 5))
    view.take(news_of(fleet_of(verifier("a")), 4))
    assert list(assigned(view)) == ["b"]
    restarted = dataclasses.replace(news_of(fleet_of(verifier("c")), is_whole=False), cursor=Cursor(epoch=2, version=1))
    view.take(restarted)
    assert list(assigned(view)) == ["b", "c"], "it does not know all yet"
    assert view.ask("g").seen == Cursor(epoch=2, version=1)


def test_before_the_first_news_there_is_no_fleet():
    view = FleetView()
    assert view.fleet is None
    assert view.snapshot is None
    assert view.ask("g").seen is None
    with pytest.raises(NoVerifierError, match="not heard yet"):
        view.place(ask(), NOW_S)


def test_the_routers_policy_holds():
    view = view_of(verifier("p", role=VerifierRole.PREFILL), verifier("d"))
    long = ask(may_hand_over=True)
    assert view.place_of(long, NOW_S).prefill_verifier_id is None
    news = news_of(view.fleet, 2)
    view.take(dataclasses.replace(news, policy=RouterPolicy(min_handover_tokens=5)))
    assert view.place_of(long, NOW_S).prefill_verifier_id == "p"


# --- own requests ---


def test_a_burst_spreads_over_verifiers_and_drafters_before_any_report():
    view = view_of(verifier("a", num_running=3), verifier("b"), drafters=(drafter_report("d0"), drafter_report("d1")))
    picks = [send(view, f"r{index}") for index in range(7)]
    assert [verifier_id for verifier_id, _ in picks[:3]] == ["b"] * 3
    assert sorted(verifier_id for verifier_id, _ in picks[3:]) == ["a", "a", "b", "b"]
    assert abs(sum(1 if drafter_id == "d0" else -1 for _, drafter_id in picks)) == 1


def test_a_request_is_counted_until_its_verifiers_report_includes_it():
    view = view_of(verifier("a"))
    send(view, "r0")
    send(view, "r1")
    view.accept("r0", 8)
    view.accept("r1", 9)
    assert assigned(view) == {"a": 2}
    view.take(news_of(fleet_of(verifier("a", num_taken=8, num_running=1)), 2, is_whole=False))
    assert assigned(view) == {"a": 1}, "the report was made between the two"
    view.take(news_of(fleet_of(verifier("a", num_taken=9, num_running=2)), 3, is_whole=False))
    assert assigned(view) == {"a": 0}


def test_a_report_may_come_before_the_verifier_says_that_it_has_the_request():
    view = view_of(verifier("a"))
    send(view, "r0")
    view.take(news_of(fleet_of(verifier("a", num_taken=5)), 2, is_whole=False))
    assert assigned(view) == {"a": 1}, "who knows whether it is in it"
    view.accept("r0", 5)
    assert assigned(view) == {"a": 0}


def test_what_has_ended_is_counted_no_longer_whatever_is_reported():
    view = view_of(verifier("a"), drafters=(drafter_report("d0"),))
    send(view, "r0")
    assert view.fleet.drafters[0].num_assigned == 1
    view.end("r0")
    view.end("r0")
    view.accept("r0", 1)
    assert assigned(view) == {"a": 0}
    assert view.fleet.drafters[0].num_assigned == 0


def test_requests_at_a_verifier_that_left_and_came_back_are_still_counted():
    view = view_of(verifier("a"))
    send(view, "r0")
    view.take(news_of(fleet_of(), 2))
    assert assigned(view) == {}
    view.take(news_of(fleet_of(verifier("a")), 3))
    assert assigned(view) == {"a": 1}


def test_nothing_is_kept_of_requests_that_are_over():
    view = view_of(verifier("a"), verifier("b"), drafters=(drafter_report("d0"),))
    for index in range(4):
        send(view, f"r{index}")
    for index in range(4):
        view.end(f"r{index}")
    assert (view._sent, dict(view._num_sent), dict(view._num_drafted)) == ({}, {}, {})


# --- what is counted for operators ---


def counts(view) -> tuple[list, list]:
    snapshot = view.snapshot
    return (
        [(item.decision, item.reason, item.count) for item in snapshot.decisions],
        [(item.reason.value, item.count) for item in snapshot.placements],
    )


def test_what_a_gateway_chose_is_shown_at_once_and_once():
    view = view_of(verifier("a"), drafters=(drafter_report("d0"),))
    send(view, "r0")
    assert counts(view) == ([("on", "none", 1)], [("only", 1)])
    tally = view.ask("g").tally
    told = fleet_of(verifier("a"), drafters=(drafter_report("d0"),)).with_counts(tally.decisions, tally.placements)
    view.take(news_of(told, 2))
    send(view, "r1")
    assert counts(view) == ([("on", "none", 2)], [("only", 2)]), "one by the router, one since"


def test_who_only_asks_where_a_request_would_go_counts_nothing():
    view = view_of(verifier("a"))
    view.place_of(ask(), NOW_S)
    assert counts(view) == ([], [])
    assert assigned(view) == {"a": 0}
