"""How a request looks for room: first without waiting, then in a queue."""

from __future__ import annotations

import pytest

from fakes.reports import verifier_report
from outrider.cluster.router.fleet import Assignment, PlacementReason, VerifierState
from outrider.cluster.router.search import MAX_FULL, MAX_PASSED, Search
from outrider.verifier_service.messages.request import SpeculationPlan

LIMIT = 40


def asked(search: Search, name: str = "v", *, reason: PlacementReason = PlacementReason.PREFIX, num_waiting: int = 0):
    chosen = Assignment(verifier_id=name, endpoint="", plan=SpeculationPlan(), reason=reason)
    report = verifier_report(name, num_waiting=num_waiting)
    return search.most_waiting(chosen, VerifierState(report=report, reported_s=0.0, default_plan=chosen.plan), LIMIT)


def test_where_nobody_is_known_to_wait_it_does_not_either():
    assert asked(Search()) == 0


@pytest.mark.parametrize(
    ("search", "fields"),
    [
        (Search(), {"num_waiting": 1}),
        (Search(), {"reason": PlacementReason.ONLY}),
        (Search(may_wait=True), {}),
    ],
    ids=["others are known to wait", "there is no other verifier", "it is to stay"],
)
def test_it_waits_where_that_is_known_to_be_the_best(search: Search, fields: dict):
    assert asked(search, **fields) == LIMIT


def test_after_some_that_had_no_room_it_waits():
    search = Search()
    for place in range(MAX_PASSED):
        assert asked(search, f"v{place}") == 0
        assert search.refused(f"v{place}")
    assert asked(search) == LIMIT
    assert search.excluded_ids == ("v0", "v1")


def test_where_none_is_left_it_waits_at_one_that_had_no_room_but_not_in_a_full_queue():
    search = Search()
    asked(search, "busy")
    search.refused("busy")
    asked(search, "full", num_waiting=9)
    search.refused("full")
    assert search.none_left()
    assert search.excluded_ids == ("full",)
    assert asked(search, "busy") == LIMIT
    assert not search.none_left(), "once"


def test_after_some_full_queues_it_is_refused():
    search = Search()
    more = []
    for place in range(MAX_FULL):
        asked(search, f"v{place}", num_waiting=9)
        more.append(search.refused(f"v{place}"))
    assert more == [True] * (MAX_FULL - 1) + [False]
