import dataclasses

import pytest

from fakes.reports import changed, drafter_report, verifier_report
from outrider.cluster.router.fleet import (
    DrafterState,
    FleetPause,
    FleetSnapshot,
    RouteAsk,
    RouterPolicy,
    VerifierRole,
    VerifierState,
)
from outrider.cluster.router.routing import NoVerifierError, route
from outrider.verifier_service.messages.engine import DrafterCircuit, DrafterPerformance
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan

POLICY = RouterPolicy(expire_after_s=3.0, stale_snapshot_s=10.0, max_queue_depth=8)
NOW_S = 100.0


def verifier(
    verifier_id,
    *,
    default_length=4,
    reason=None,
    drafters_up=("d0", "d1"),
    draining=False,
    price=None,
    role=VerifierRole.BOTH,
    **load,
):
    figures = {"num_running": 0, "num_waiting": 0, "num_decoding": 0, "kv_usage": 0.0} | load
    report = verifier_report(verifier_id, linked_drafters=drafters_up, draining=draining, role=role, **figures)
    drafter_id = "d0" if default_length else None
    plan = SpeculationPlan(drafter_id=drafter_id, draft_length=default_length, disabled_reason=reason)
    return VerifierState(report=report, reported_s=NOW_S, default_plan=plan, price=price)


def drafter(drafter_id, **figures):
    report = drafter_report(drafter_id, **{"mean_draft_s": 0.001} | figures)
    return DrafterState(report=report, reported_s=NOW_S)


def snapshot(verifiers, drafters=(), decided_at_s=NOW_S):
    return FleetSnapshot(verifiers=tuple(verifiers), drafters=tuple(drafters), decided_at_s=decided_at_s)


def ask(request_id="r", **fields):
    return RouteAsk(request_id=request_id, num_prompt_tokens=10, **fields)


def chosen(fleet, request=None, now_s=NOW_S):
    return route(fleet, request or ask(), now_s, POLICY)


class TestVerifier:
    def test_least_loaded_wins(self):
        fleet = snapshot([verifier("busy", num_running=9), verifier("calm", num_running=2)])
        assert chosen(fleet).verifier_id == "calm"
        assert chosen(fleet).endpoint == "calm:1"

    def test_waiting_weighs_more_than_running(self):
        fleet = snapshot([verifier("queue", num_running=4, num_waiting=3), verifier("runs", num_running=9)])
        assert chosen(fleet).verifier_id == "runs"

    def test_a_full_cache_counts_as_load(self):
        fleet = snapshot([verifier("full", num_running=4, kv_usage=0.98), verifier("free", num_running=9)])
        assert chosen(fleet).verifier_id == "free"

    @pytest.mark.parametrize(("num_running", "wins"), [(11, "cheap"), (13, "dear")])
    def test_where_tokens_are_dear_counts_as_load(self, num_running, wins):
        fleet = snapshot([verifier("dear", num_running=4, price=1.0), verifier("cheap", num_running=num_running)])
        assert chosen(fleet).verifier_id == wins

    def test_what_a_load_does_not_include_yet_counts(self):
        fleet = snapshot([verifier("new", num_pending=3), verifier("old", num_running=2)])
        assert chosen(fleet).verifier_id == "old"
        own = snapshot([dataclasses.replace(verifier("own"), num_assigned=3), verifier("old", num_running=2)])
        assert chosen(own).verifier_id == "old"

    def test_an_urgent_request_overtakes_those_that_wait(self):
        fleet = snapshot([verifier("queue", num_running=4, num_waiting=9), verifier("runs", num_running=9)])
        assert chosen(fleet, ask(priority=-1)).verifier_id == "queue"
        assert chosen(fleet, ask(priority=1)).verifier_id == "runs"

    def test_excluded_verifiers_are_left_out(self):
        fleet = snapshot([verifier("failed"), verifier("busy", num_running=5)])
        assert chosen(fleet, ask(excluded_verifier_ids=("failed",))).verifier_id == "busy"

    def test_says_why_there_is_none(self):
        fleet = snapshot([verifier("leaves", draining=True), verifier("failed")])
        with pytest.raises(NoVerifierError, match=r"2 known, 1 draining, 0 that have not .*, 1 excluded"):
            chosen(fleet, ask(excluded_verifier_ids=("failed",)))
        with pytest.raises(NoVerifierError, match="0 known"):
            chosen(snapshot([]))

    def test_a_verifier_that_does_not_know_of_the_pause_yet_gets_no_request(self):
        paused = verifier("paused", num_running=90, is_paused=True, pause_asked_s=5.0)
        joins, followed = verifier("joins"), verifier("joins", is_paused=True, pause_asked_s=5.0)
        fleet = dataclasses.replace(snapshot([paused, joins]), pause=FleetPause(asked_s=5.0, is_paused=True))
        assert chosen(fleet).verifier_id == "paused"
        assert chosen(dataclasses.replace(fleet, verifiers=(paused, followed))).verifier_id == "joins"
        goes_on = dataclasses.replace(fleet, pause=FleetPause(asked_s=6.0, is_paused=False))
        assert chosen(goes_on).verifier_id == "joins", "it runs, as the fleet does"
        with pytest.raises(NoVerifierError, match="1 that have not followed the fleet's weights or pause"):
            chosen(dataclasses.replace(fleet, verifiers=(joins,)))

    def test_only_those_with_the_newest_weights_are_chosen(self):
        old = {"weight_version": "default", "weights_taken_s": 0.0}
        fleet = snapshot(
            [
                verifier("late", **old),
                verifier("behind", weight_version="1", weights_taken_s=5.0),
                verifier("new", num_running=90, weight_version="2", weights_taken_s=9.0),
                verifier("half", weight_version="2", weights_taken_s=8.0, weights_error="broke off"),
            ]
        )
        assert chosen(fleet).verifier_id == "new"
        with pytest.raises(NoVerifierError, match="3 that have not followed the fleet's weights"):
            chosen(fleet, ask(excluded_verifier_ids=("new",)))
        assert chosen(snapshot([verifier("a", **old), verifier("b", num_running=1, **old)])).verifier_id == "a"

    def test_ties_spread_by_request_and_repeat(self):
        verifiers = [verifier(f"v{i}") for i in range(4)]
        picks = [chosen(snapshot(verifiers), ask(f"r{i}")).verifier_id for i in range(400)]
        assert min(picks.count(f"v{i}") for i in range(4)) > 60
        assert picks == [chosen(snapshot(verifiers[::-1]), ask(f"r{i}")).verifier_id for i in range(400)]


@pytest.mark.parametrize(
    ("verifiers", "fields", "age_s", "reason"),
    [
        (["a"], {}, 0.0, "only"),
        (["a"], {"affinity_key": "k"}, 99.0, "only"),
        (["a", "b"], {"excluded_verifier_ids": ("b",)}, 0.0, "only"),
        (["a", "b"], {}, 0.0, "least_load"),
        (["a", "b"], {}, 99.0, "spread"),
        (["a", "b"], {"affinity_key": "k"}, 0.0, "prefix"),
        (["a", "b"], {"affinity_key": "k"}, 99.0, "prefix"),
    ],
)
def test_says_why_it_chose(verifiers, fields, age_s, reason):
    fleet = snapshot([verifier(name) for name in verifiers])
    assert chosen(fleet, ask(**fields), NOW_S + age_s).reason == reason


def test_a_request_that_its_prefix_had_to_leave_says_so():
    request = ask(affinity_key="k")
    favourite = chosen(snapshot([verifier("a"), verifier("b")]), request).verifier_id
    fleet = snapshot([verifier(name, num_running=50 if name == favourite else 0) for name in "ab"])
    assert chosen(fleet, request).verifier_id != favourite
    assert chosen(fleet, request).reason == "spill"


class TestDraining:
    def test_a_draining_verifier_gets_no_new_request(self):
        fleet = snapshot([verifier("ends", draining=True), verifier("busy", num_running=50)])
        assert chosen(fleet).verifier_id == "busy"
        assert chosen(fleet, ask(affinity_key="k")).verifier_id == "busy"


class TestAffinity:
    """A key's requests stay together within 1.25 times the least load plus 4."""

    def picks(self, verifiers, num_keys=300):
        return {
            key: chosen(snapshot(verifiers), ask(f"r{key}", affinity_key=f"k{key}")).verifier_id
            for key in range(num_keys)
        }

    def test_a_key_keeps_its_verifier_whatever_the_request_and_the_order(self):
        verifiers = [verifier(f"v{i}") for i in range(4)]
        picks = {
            chosen(snapshot(order), ask(f"r{i}", affinity_key="k")).verifier_id
            for i in range(20)
            for order in (verifiers, verifiers[::-1])
        }
        assert len(picks) == 1

    def test_keys_spread_evenly(self):
        picks = list(self.picks([verifier(f"v{i}") for i in range(3)]).values())
        assert min(picks.count(f"v{i}") for i in range(3)) > 70

    def test_only_the_keys_of_a_verifier_that_leaves_move(self):
        four = [verifier(f"v{i}") for i in range(4)]
        before, after = self.picks(four), self.picks(four[:3])
        assert all(after[key] == verifier_id for key, verifier_id in before.items() if verifier_id != "v3")

    @pytest.mark.parametrize(("load", "keeps"), [(29, True), (30, False)])
    def test_a_loaded_verifier_keeps_its_keys_within_the_bound(self, load, keeps):
        calm = [verifier(f"v{i}", num_running=20) for i in range(3)]
        preferred = chosen(snapshot(calm), ask(affinity_key="k")).verifier_id
        fleet = [verifier(f"v{i}", num_running=load if f"v{i}" == preferred else 20) for i in range(3)]
        picks = {chosen(snapshot(fleet), ask(f"r{i}", affinity_key="k")).verifier_id for i in range(20)}
        assert len(picks) == 1, "what spills over stays together too"
        assert (picks == {preferred}) == keeps


class TestWhileTheRouterIsAway:
    def test_its_silence_does_not_kill_the_fleet(self):
        fleet = snapshot([verifier("a")], [drafter("d0")])
        assignment = chosen(fleet, now_s=NOW_S + 3600)
        assert assignment.verifier_id == "a"
        assert assignment.plan.drafter_id == "d0"

    def test_old_loads_no_longer_attract_everything(self):
        fleet = snapshot([verifier("was_idle"), verifier("was_busy", num_running=50)])
        fresh = {chosen(fleet, ask(f"r{i}"), NOW_S + 9).verifier_id for i in range(50)}
        stale = {chosen(fleet, ask(f"r{i}"), NOW_S + 11).verifier_id for i in range(50)}
        assert fresh == {"was_idle"}
        assert stale == {"was_idle", "was_busy"}


class TestPlan:
    def plan(self, drafters, request=None, **verifier_fields):
        return chosen(snapshot([verifier("v", **verifier_fields)], drafters), request).plan

    def test_least_loaded_drafter_wins(self):
        drafters = [drafter("d0", num_sessions=5), drafter("d1", num_sessions=2, queue_depth=1)]
        assert self.plan(drafters) == SpeculationPlan(drafter_id="d1", draft_length=4)

    def test_opt_out(self):
        plan = self.plan([drafter("d0")], ask(num_speculative_tokens=0))
        assert plan == SpeculationPlan(disabled_reason=DisabledReason.REQUEST_OPT_OUT)

    def test_the_shortest_delay_wins(self):
        """Two more at 2 ms take longer than one at 4 ms."""
        state = verifier("v")
        trips_s = {"d0": 0.002, "d1": 0.004}
        trips = tuple(DrafterPerformance(drafter_id=name, round_trip_s=trip_s) for name, trip_s in trips_s.items())
        state = dataclasses.replace(state, report=changed(state.report, drafters=trips))
        for busy, wins in ((2, "d1"), (0, "d0")):
            fleet = snapshot([state], [drafter("d0", num_sessions=busy), drafter("d1")])
            assert chosen(fleet).plan.drafter_id == wins

    def test_drafts_that_come_late_count_as_none(self):
        """With two of five in time, a drafter of 2 ms takes 5 ms for each of those."""
        state = verifier("v")
        for late_share, wins in ((0.3, "d0"), (0.6, "d1"), (1.0, "d1")):
            trips = (
                DrafterPerformance(drafter_id="d0", round_trip_s=0.002, late_share=late_share),
                DrafterPerformance(drafter_id="d1", round_trip_s=0.004),
            )
            state = dataclasses.replace(state, report=changed(state.report, drafters=trips))
            assert chosen(snapshot([state], [drafter("d0"), drafter("d1")])).plan.drafter_id == wins

    @pytest.mark.parametrize(("cap", "length"), [(1, 1), (4, 4), (9, 4), (None, 4)])
    def test_the_request_caps_its_draft(self, cap, length):
        assert self.plan([drafter("d0")], ask(num_speculative_tokens=cap)).draft_length == length

    def test_the_drafter_caps_too(self):
        assert self.plan([drafter("d0", max_draft_length=2)]).draft_length == 2

    def test_the_verifiers_reason_holds(self):
        off = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
        assert self.plan([drafter("d0")], default_length=0, reason=DisabledReason.LOAD) == off

    def test_a_drafter_that_drains_gets_nothing(self):
        assert self.plan([drafter("d0", draining=True), drafter("d1", num_sessions=50)]).drafter_id == "d1"
        assert self.plan([drafter("d0", draining=True)]).disabled_reason == "drafter_unavailable"

    def test_a_drafter_without_a_link_gets_nothing(self):
        """It reports to the router and looks idle, but this verifier cannot reach it."""
        assert self.plan([drafter("d0"), drafter("d1", num_sessions=9)], drafters_up=("d1",)).drafter_id == "d1"
        assert self.plan([drafter("d0")], drafters_up=()).disabled_reason == "drafter_unavailable"

    def test_a_drafter_that_failed_too_often_gets_nothing_for_a_reason_of_its_own(self):
        open_circuit = DrafterCircuit(drafter_id="d0", state="open")
        plan = self.plan([drafter("d0")], drafters_up=(), circuits=(open_circuit,))
        assert plan.disabled_reason == "drafter_timeout"
        both = [drafter("d0"), drafter("d1", queue_depth=9)]
        assert self.plan(both, drafters_up=("d1",), circuits=(open_circuit,)).disabled_reason == "draft_queue"

    def test_a_queue_at_every_drafter(self):
        assert self.plan([drafter("d0", queue_depth=9)]).disabled_reason == "draft_queue"


class TestOwnDrafter:
    """A drafter in the verifier's own process needs no report and no link."""

    def plan(self, drafters=(), *, default_length=4, request=None, own=6, **fields):
        state = verifier("v", default_length=default_length, **fields)
        state = dataclasses.replace(state, report=dataclasses.replace(state.report, own_draft_length=own))
        return chosen(snapshot([state], drafters), request).plan

    def test_it_drafts_where_there_is_no_pool(self):
        assert self.plan() == SpeculationPlan(drafter_id="local", draft_length=4)

    def test_it_bounds_the_length(self):
        assert self.plan(own=3).draft_length == 3
        assert self.plan(own=3, request=ask(num_speculative_tokens=2)).draft_length == 2

    def test_without_one_there_is_nobody(self):
        assert self.plan(own=0) == SpeculationPlan(disabled_reason=DisabledReason.DRAFTER_UNAVAILABLE)

    def test_it_is_the_least_loaded(self):
        assert self.plan([drafter("d0", num_sessions=1)]).drafter_id == "local"

    def test_full_queues_elsewhere_are_not_its_own(self):
        assert self.plan([drafter("d0", queue_depth=99)]).drafter_id == "local"

    def test_the_verifiers_reason_and_the_opt_out_hold(self):
        plan = SpeculationPlan(disabled_reason=DisabledReason.LOAD)
        assert self.plan(default_length=0, reason=DisabledReason.LOAD) == plan
        assert self.plan(request=ask(num_speculative_tokens=0)).disabled_reason == "request_opt_out"


def prefiller(verifier_id, **figures):
    return verifier(verifier_id, role=VerifierRole.PREFILL, **figures)


def decoder(verifier_id, **figures):
    return verifier(verifier_id, role=VerifierRole.DECODE, **figures)


def places(fleet, num_prompt_tokens=500, may_hand_over=True, **fields):
    """Return who decodes, and who computes the prompt for it."""
    request = RouteAsk(request_id="r", num_prompt_tokens=num_prompt_tokens, may_hand_over=may_hand_over, **fields)
    assignment = chosen(fleet, request)
    assert (assignment.prefill_verifier_id is None) == (assignment.prefill_endpoint == "")
    return assignment.verifier_id, assignment.prefill_verifier_id


class TestRoles:
    def test_a_long_prompt_is_computed_at_the_least_loaded_of_those_for_it_and_decoded_elsewhere(self):
        fleet = snapshot([prefiller("p0", num_running=3), prefiller("p1"), decoder("d0", num_running=9), decoder("d1")])
        assert places(fleet) == ("d1", "p1")
        assert chosen(fleet, RouteAsk(request_id="r", num_prompt_tokens=500, may_hand_over=True)).prefill_endpoint == (
            "p1:1"
        )

    def test_a_busy_decoder_is_no_reason_to_decode_where_prompts_are_computed(self):
        fleet = snapshot([prefiller("p0"), decoder("d0", num_running=99, num_waiting=9)])
        assert places(fleet) == ("d0", "p0")

    @pytest.mark.parametrize(
        "fields",
        [{"num_prompt_tokens": POLICY.min_handover_tokens - 1}, {"may_hand_over": False}],
        ids=["a short prompt", "a request that stays together"],
    )
    def test_what_is_not_worth_it_is_computed_where_it_decodes(self, fields):
        fleet = snapshot([prefiller("p0"), decoder("d0", num_running=9)])
        assert places(fleet, **fields) == ("d0", None)
        assert places(fleet, num_prompt_tokens=POLICY.min_handover_tokens) == ("d0", "p0")

    def test_without_roles_every_verifier_does_both(self):
        assert places(snapshot([verifier("v0")])) == ("v0", None)

    @pytest.mark.parametrize(
        ("gone", "expected"),
        [
            ({"draining": True}, ("d0", None)),
            ({"weight_version": "2"}, ("d0", None)),
            ({"weights_error": "half"}, ("d0", None)),
        ],
        ids=["it drains", "it has other weights", "its weights are broken"],
    )
    def test_one_that_takes_nothing_computes_no_prompt(self, gone, expected):
        newest = decoder("d0", weights_taken_s=1.0)
        assert places(snapshot([prefiller("p0", **gone), newest])) == expected
        assert places(snapshot([prefiller("p0", **gone), prefiller("p1"), newest])) == ("d0", "p1")

    def test_one_that_failed_the_request_is_left_out(self):
        fleet = snapshot([prefiller("p0"), prefiller("p1", num_running=5), decoder("d0")])
        assert places(fleet, excluded_verifier_ids=("p0",)) == ("d0", "p1")
        assert places(fleet, excluded_verifier_ids=("p0", "p1")) == ("d0", None)

    def test_with_no_decoder_left_one_for_prompts_does_both(self):
        fleet = snapshot([prefiller("p0", num_running=9), prefiller("p1"), decoder("d0", draining=True)])
        assert places(fleet) == ("p1", None)
        assert places(fleet, excluded_verifier_ids=("p1",)) == ("p0", None)

    def test_a_prefix_goes_where_it_went_before_for_its_prompt_too(self):
        fleet = snapshot([*(prefiller(f"p{i}") for i in range(4)), decoder("d0"), decoder("d1")])
        found = {places(fleet, affinity_key="session") for _ in range(3)}
        assert len(found) == 1
        others = {places(fleet, affinity_key=f"s{i}")[1] for i in range(40)}
        assert others == {"p0", "p1", "p2", "p3"}
