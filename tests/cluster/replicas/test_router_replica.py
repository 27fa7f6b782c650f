from __future__ import annotations

import asyncio
import contextlib
import os
import time

import pytest

from fakes import reports
from outrider.cluster.replicas import router_replica
from outrider.cluster.replicas.router_replica import NEWS_INTERVAL_S, RouterReplica
from outrider.cluster.router.fleet import (
    DrafterEndpoint,
    DrafterReport,
    PolicyMode,
    RouterPolicy,
    VerifierReport,
)
from outrider.cluster.router.news import Cursor, FleetNews, NewsAsk
from outrider.cluster.router.router import StaleEpochError
from outrider.drafter_service.learning.messages import LearnerStatus
from outrider.verifier_service.messages.request import SpeculationPlan
from outrider.verifier_service.messages.wire import decode


async def news(replica: RouterReplica, seen: Cursor | None = None) -> FleetNews:
    """Return the first news of a call."""
    async with contextlib.aclosing(replica.news(NewsAsk(gateway_id="g", seen=seen))) as payloads:
        return decode(await anext(payloads), (FleetNews,))


def plan_in(told: FleetNews) -> SpeculationPlan:
    (state,) = told.changed.verifiers
    return state.default_plan


def verifier_report(epoch: int = 1, **fields) -> VerifierReport:
    return reports.verifier_report("v", epoch=epoch, **{"linked_drafters": ("d",)} | fields)


def drafter_report(epoch: int = 1) -> DrafterReport:
    return reports.drafter_report("d", epoch=epoch)


async def test_what_reports_brings_news_and_directives():
    replica = RouterReplica(RouterPolicy(mode=PolicyMode.ALWAYS, max_draft_length=5))
    assert await replica.report_drafter(drafter_report()) is None
    directive = await replica.report_verifier(verifier_report())
    assert directive.drafters == (DrafterEndpoint(drafter_id="d", endpoint="d:1", epoch=1),)
    assert directive.default_plan.draft_length == 5
    told = await news(replica)
    assert [(state.report.verifier_id, state.report.endpoint) for state in told.changed.verifiers] == [("v", "v:1")]
    assert (plan_in(told).drafter_id, plan_in(told).draft_length) == ("d", 5)


async def test_the_policy_is_the_operators():
    replica = RouterReplica(RouterPolicy(mode=PolicyMode.OFF))
    await replica.report_drafter(drafter_report())
    await replica.report_verifier(verifier_report())
    assert plan_in(await news(replica)).draft_length == 0


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


async def test_snapshots_carry_wall_clock_times():
    replica = RouterReplica(RouterPolicy())
    before_s = time.time()
    await replica.report_verifier(verifier_report())
    snapshot = await replica.snapshot()
    (state,) = snapshot.verifiers
    assert before_s <= state.reported_s <= snapshot.decided_at_s <= time.time()


async def test_replicas_that_say_nothing_expire():
    replica = RouterReplica(RouterPolicy(expire_after_s=1e-6))
    await replica.report_verifier(verifier_report())
    time.sleep(0.01)
    assert (await replica.snapshot()).verifiers == ()
    told = await news(replica)
    assert (told.changed.verifiers, told.is_whole) == ((), True)


async def test_a_removed_replica_is_gone_at_once():
    replica = RouterReplica(RouterPolicy())
    await replica.report_drafter(drafter_report())
    await replica.report_verifier(verifier_report())
    await replica.remove("v")
    await replica.remove("d")
    await replica.remove("never seen")
    snapshot = await replica.snapshot()
    assert (snapshot.verifiers, snapshot.drafters) == ((), ())


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


# --- a call for news ---


class Listener:
    """Hears one call out, as a gateway does."""

    def __init__(self, replica: RouterReplica, seen: Cursor | None = None) -> None:
        self.heard: list[FleetNews] = []
        self.heard_s: list[float] = []
        self._ask = NewsAsk(gateway_id="g", seen=seen)
        self.call = asyncio.ensure_future(self._listen(replica))

    async def _listen(self, replica: RouterReplica) -> None:
        async for payload in replica.news(self._ask):
            self.heard.append(decode(payload, (FleetNews,)))
            self.heard_s.append(asyncio.get_running_loop().time())

    async def until(self, num_heard: int) -> None:
        async with asyncio.timeout(5):
            while len(self.heard) < num_heard:
                await asyncio.sleep(0.001)


async def test_news_come_at_once_and_what_comes_soon_after_comes_together():
    replica = RouterReplica(RouterPolicy())
    listener = Listener(replica)
    await listener.until(1)
    await asyncio.sleep(2 * NEWS_INTERVAL_S)
    for number in range(1, 6):
        await replica.report_verifier(reports.verifier_report("v", num_running=number))
        await asyncio.sleep(0)
    await listener.until(3)
    await asyncio.sleep(2 * NEWS_INTERVAL_S)
    running = [state.report.load.num_running for told in listener.heard for state in told.changed.verifiers]
    assert running[-1] == 5
    assert len(listener.heard) == 3, "the first, the one at once, and one for all that followed"
    assert listener.heard_s[2] - listener.heard_s[1] >= 0.9 * NEWS_INTERVAL_S
    listener.call.cancel()


async def test_a_fleet_at_rest_is_told_of_once_a_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_replica, "NEWS_CALL_S", 0.6)
    replica = RouterReplica(RouterPolicy())
    await replica.report_verifier(verifier_report())
    listener = Listener(replica)
    while not listener.call.done():
        await replica.report_verifier(verifier_report())
        await asyncio.sleep(0.05)
    assert len(listener.heard) == 1
    again = Listener(replica, listener.heard[0].cursor)
    await again.until(1)
    assert again.heard[0].changed.verifiers == ()
    assert again.heard[0].changed.decided_at_s >= listener.heard[0].changed.decided_at_s + 0.5, "it is of now"
    again.call.cancel()


async def test_a_verifier_that_falls_silent_is_news_though_nobody_reports(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router_replica, "LOOK_INTERVAL_S", 0.02)
    replica = RouterReplica(RouterPolicy(expire_after_s=0.2))
    await replica.report_verifier(verifier_report())
    listener = Listener(replica)
    async with asyncio.timeout(5):
        while not listener.heard or listener.heard[-1].changed.verifiers:
            await asyncio.sleep(0.01)
    assert listener.heard[-1].is_whole
    listener.call.cancel()


async def test_all_gateways_are_told_the_same():
    replica = RouterReplica(RouterPolicy())
    listeners = [Listener(replica) for _ in range(3)]
    for listener in listeners:
        await listener.until(1)
    await asyncio.sleep(2 * NEWS_INTERVAL_S)
    await replica.report_verifier(verifier_report())
    for listener in listeners:
        await listener.until(2)
        assert [state.report.verifier_id for state in listener.heard[1].changed.verifiers] == ["v"]
        listener.call.cancel()
