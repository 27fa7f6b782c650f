from __future__ import annotations

import os
import time

import pytest

from fakes import reports
from outrider.cluster.replicas.router_replica import RouterReplica
from outrider.cluster.router.fleet import (
    DrafterEndpoint,
    DrafterReport,
    PolicyMode,
    RouteAnswer,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
)
from outrider.cluster.router.router import StaleEpochError
from outrider.drafter_service.learning.messages import LearnerStatus

ASK = RouteAsk(request_id="r", num_prompt_tokens=3)


def verifier_report(epoch: int = 1, **fields) -> VerifierReport:
    return reports.verifier_report("v", epoch=epoch, **{"linked_drafters": ("d",)} | fields)


def drafter_report(epoch: int = 1) -> DrafterReport:
    return reports.drafter_report("d", epoch=epoch)


async def test_a_router_that_is_new_cannot_tell_that_there_is_no_verifier():
    replica = RouterReplica(RouterPolicy(expire_after_s=0.05))
    assert await replica.route(ASK) is None
    await replica.report_drafter(drafter_report())
    assert await replica.route(ASK) is None
    time.sleep(0.06)
    assert await replica.route(ASK) == RouteAnswer(None)


async def test_what_reports_brings_routes_and_directives():
    replica = RouterReplica(RouterPolicy(mode=PolicyMode.ALWAYS, max_draft_length=5))
    assert await replica.report_drafter(drafter_report()) is None
    directive = await replica.report_verifier(verifier_report())
    assert directive.drafters == (DrafterEndpoint(drafter_id="d", endpoint="d:1", epoch=1),)
    assert directive.default_plan.draft_length == 5
    assignment = (await replica.route(ASK)).assignment
    assert (assignment.verifier_id, assignment.endpoint) == ("v", "v:1")
    assert (assignment.plan.drafter_id, assignment.plan.draft_length) == ("d", 5)


async def test_the_policy_is_the_operators():
    replica = RouterReplica(RouterPolicy(mode=PolicyMode.OFF))
    await replica.report_drafter(drafter_report())
    await replica.report_verifier(verifier_report())
    assert (await replica.route(ASK)).assignment.plan.draft_length == 0


async def test_a_user_config_changes_the_plans_of_the_next_report():
    replica = RouterReplica(RouterPolicy(mode=PolicyMode.ALWAYS, max_draft_length=5))
    await replica.report_drafter(drafter_report())
    assert (await replica.report_verifier(verifier_report())).default_plan.draft_length == 5
    replica.reconfigure({"max_draft_length": 2})
    assert (await replica.report_verifier(verifier_report())).default_plan.draft_length == 2
    replica.reconfigure({"mode": "off"})
    assert (await replica.report_verifier(verifier_report())).default_plan.disabled_reason == "config"
    replica.reconfigure({})
    assert (await replica.report_verifier(verifier_report())).default_plan.draft_length == 5


async def test_a_bad_user_config_is_refused_and_changes_nothing():
    replica = RouterReplica(RouterPolicy(mode=PolicyMode.ALWAYS, max_draft_length=5))
    with pytest.raises(ValueError, match="did you mean 'max_draft_length'"):
        replica.reconfigure({"mode": "off", "max_draft_lenght": 2})
    await replica.report_drafter(drafter_report())
    assert (await replica.report_verifier(verifier_report())).default_plan.draft_length == 5


async def test_snapshots_carry_wall_clock_times_and_assignments():
    replica = RouterReplica(RouterPolicy())
    before_s = time.time()
    await replica.report_verifier(verifier_report())
    await replica.route(ASK)
    snapshot = await replica.snapshot()
    (state,) = snapshot.verifiers
    assert before_s <= state.reported_s <= snapshot.decided_at_s <= time.time()
    assert state.num_assigned == 1


async def test_replicas_that_say_nothing_expire():
    replica = RouterReplica(RouterPolicy(expire_after_s=1e-6))
    await replica.report_verifier(verifier_report())
    time.sleep(0.01)
    assert await replica.route(ASK) == RouteAnswer(None)
    assert (await replica.snapshot()).verifiers == ()


async def test_a_removed_replica_is_gone_at_once():
    replica = RouterReplica(RouterPolicy())
    await replica.report_drafter(drafter_report())
    await replica.report_verifier(verifier_report())
    await replica.remove("v")
    await replica.remove("d")
    await replica.remove("never seen")
    assert await replica.route(ASK) is None
    assert (await replica.snapshot()).drafters == ()


async def test_what_learners_are_at_is_in_the_snapshot_while_they_report():
    replica = RouterReplica(RouterPolicy(expire_after_s=0.2))
    await replica.report_learner(LearnerStatus(pool="default", serving="v1"))
    await replica.report_learner(LearnerStatus(pool="look"))
    await replica.report_learner(LearnerStatus(pool="default", serving="v2"))
    assert [(each.pool, each.serving) for each in (await replica.snapshot()).learners] == [
        ("default", "v2"),
        ("look", "v0"),
    ]
    time.sleep(0.25)
    assert (await replica.snapshot()).learners == ()


async def test_an_older_incarnation_is_refused():
    replica = RouterReplica(RouterPolicy())
    await replica.report_verifier(verifier_report(epoch=2))
    await replica.report_drafter(drafter_report(epoch=2))
    with pytest.raises(StaleEpochError):
        await replica.report_verifier(verifier_report(epoch=1))
    with pytest.raises(StaleEpochError):
        await replica.report_drafter(drafter_report(epoch=1))


async def test_it_tells_its_process():
    assert await RouterReplica(RouterPolicy()).pid() == os.getpid()
