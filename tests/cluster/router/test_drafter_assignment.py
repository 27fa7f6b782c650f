"""Which drafter drafts for a request: pools that differ, drafters of one pool, a verifier's own drafter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fakes.reports import drafter_report, verifier_report
from outrider.cluster.router.drafter_assignment import DrafterAssigner
from outrider.cluster.router.fleet import DrafterState, RouterPolicy, VerifierReport
from outrider.verifier_service.drafting.draft_yield import DraftYield
from outrider.verifier_service.messages.engine import DrafterPerformance

POLICY = RouterPolicy(max_queue_depth=8)


def verifier(drafters_up: tuple[str, ...], **fields: Any) -> VerifierReport:
    figures = {"num_running": 0, "num_waiting": 0, "num_decoding": 0, "kv_usage": 0.0}
    return verifier_report("v", linked_drafters=drafters_up, **figures, **fields)


def drafter(drafter_id: str, **figures: Any) -> DrafterState:
    return DrafterState(report=drafter_report(drafter_id, mean_draft_s=0.001, **figures), reported_s=100.0)


class TestSeveralPools:
    """A model that brings 1.5 tokens a round in 10 ms, and a lookup that brings fewer in 1 ms; a step takes 20 ms."""

    def assigner(
        self, *, model: float | None = 1.5, lookup: float | None = 0.2, step_s: float = 0.020, **load: int
    ) -> DrafterAssigner:
        """`load`: of the model's drafter."""
        trips = (
            DrafterPerformance(drafter_id="model", round_trip_s=0.010, accepted_per_round=model),
            DrafterPerformance(drafter_id="lookup", round_trip_s=0.001, accepted_per_round=lookup),
        )
        report = verifier(("model", "lookup"), drafters=trips, mean_step_s=step_s)
        states = [drafter("model", pool="model", max_draft_length=5, **load), drafter("lookup", pool="lookup")]
        return DrafterAssigner(states, report, POLICY)

    def goes_to(self, current_id: str | None = None, **fields: Any) -> str:
        chosen = self.assigner(**fields).assign(current_id)
        assert chosen is not None
        return chosen.report.drafter_id

    def test_a_new_request_goes_where_a_token_takes_least(self):
        """(20 + 10) / 2.5 = 12 ms against (20 + 1) / 1.2 = 17.5; with a step of 1 ms 4.4 against 1.7."""
        assert self.goes_to() == "model"
        assert self.goes_to(step_s=0.001) == "lookup"
        assert self.goes_to(lookup=1.0) == "lookup", "(20 + 1) / 2 = 10.5 ms"

    def test_of_a_clearly_worse_pool_one_request_is_moved_per_report(self):
        assigner = self.assigner()
        moved = [assigner.assign("lookup").report.drafter_id for _ in range(3)]
        assert moved == ["model", "lookup", "lookup"]
        assert self.goes_to("model") == "model"

    def test_where_the_difference_is_small_requests_stay(self):
        """(20 + 1) / 1.5 = 14 ms is 1.17 times 12."""
        assert self.goes_to("lookup", lookup=0.5) == "lookup"

    def test_a_pool_that_nobody_knows_is_tried(self):
        assert self.goes_to(lookup=None) == "lookup"
        assert self.goes_to("model", lookup=None) == "lookup"
        assert self.goes_to(model=None) == "model"

    def test_nobody_is_moved_to_a_better_pool_whose_queue_is_full(self):
        assert self.goes_to("lookup", queue_depth=9) == "lookup"
        assert self.goes_to(queue_depth=9) == "lookup"

    def test_a_better_pool_is_better_however_many_requests_it_has(self):
        """How long its drafts take with them was measured; only of its own drafters the least busy one is taken."""
        assert self.goes_to(num_sessions=40) == "model"

    def test_pools_are_alike_while_it_is_not_known_who_is_of_which(self):
        """A router that has just started believes its verifiers: only the delay counts, and nobody is moved."""
        assigner = self.assigner()
        state = assigner.usable["lookup"]
        unheard = dataclasses.replace(state, report=dataclasses.replace(state.report, pool=""))
        trips = (
            DrafterPerformance(drafter_id="model", round_trip_s=0.010, accepted_per_round=1.5),
            DrafterPerformance(drafter_id="lookup", round_trip_s=0.001, accepted_per_round=0.2),
        )
        report = verifier(("model", "lookup"), drafters=trips)
        assigner = DrafterAssigner([assigner.usable["model"], unheard], report, POLICY)
        assert assigner.assign("lookup").report.drafter_id == assigner.assign(None).report.drafter_id == "lookup"

    @pytest.mark.parametrize("first", ["model", "lookup"])
    def test_a_poor_pool_is_tried_again_now_and_then_and_no_more(self, first):
        """One stream, a report every eight steps: nearly all rounds are the model's, and the lookup's never end."""
        yields = {"model": DraftYield(), "lookup": DraftYield()}
        tokens = {"model": 1.5, "lookup": 0.2}
        current, rounds = first, []
        for step in range(1, 20_001):
            if step % 8 == 0:
                current = self.assigner(**{name: found.mean_at(step) for name, found in yields.items()}).assign(current)
                current = current.report.drafter_id
            yields[current].observe_rounds(1, step)
            yields[current].observe_accepted(tokens[current])
            rounds.append(current)
        assert 0.97 < rounds[200:].count("model") / len(rounds[200:]) < 0.995
        assert "lookup" in rounds[15_000:]

    def test_drafters_of_one_pool_share_what_is_known_of_it(self):
        """A replica that has just joined is as good as its pool: nobody is moved to it for being new."""
        trips = (DrafterPerformance(drafter_id="old", round_trip_s=0.010, accepted_per_round=1.5),)
        report = verifier(("old", "new"), drafters=trips, mean_step_s=0.020)
        assigner = DrafterAssigner([drafter("old", pool="model"), drafter("new", pool="model")], report, POLICY)
        assert assigner.assign("old").report.drafter_id == "old"


def test_a_request_keeps_the_verifiers_own_drafter():
    report = dataclasses.replace(verifier(("d0", "d1")), own_draft_length=2)
    assigner = DrafterAssigner([drafter("d0")], report, POLICY)
    assert assigner.assign("local").report.drafter_id == "local"
    assert assigner.assign("local").report.epoch == report.epoch
    without = DrafterAssigner([drafter("d0")], verifier(("d0", "d1")), POLICY)
    assert without.assign("local").report.drafter_id == "d0"
