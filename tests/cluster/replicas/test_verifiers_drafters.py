"""A verifier's drafters behind the plug-in of its engine: two reports become one, directives reach it once."""

from __future__ import annotations

import pytest

from fakes.hosted.engine import Clock
from fakes.reports import changed, verifier_report
from outrider.cluster.replicas.verifiers_drafters import FRESH_S, PluginsDrafters
from outrider.cluster.router.fleet import Directive
from outrider.verifier_service.messages.engine import DrafterCircuit, DrafterPerformance, EngineCounters, StepTime
from outrider.verifier_service.messages.link import DrafterEndpoint
from outrider.verifier_service.messages.request import SpeculationPlan


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def drafters(clock: Clock) -> PluginsDrafters:
    return PluginsDrafters(clock)


ENGINES = verifier_report(
    num_running=3,
    mean_step_s=0.2,
    counters=EngineCounters(num_steps=100, num_committed_tokens=300, num_drafts=70, num_accepted_tokens=200),
)
PLUGINS = verifier_report(
    "vllm-host-1",
    num_running=2,
    mean_step_s=0.1,
    price=0.4,
    knee=32.0,
    draft_length_mean=2.5,
    counters=EngineCounters(num_steps=90, num_drafts=60, num_asks=80, num_stale_drafts=4, fallbacks={"timeout": 2}),
    drafters=(DrafterPerformance(drafter_id="d", round_trip_s=0.01),),
    circuits=(DrafterCircuit(drafter_id="d", state="closed"),),
    step_times=(StepTime(num_tokens=1, seconds=0.1),),
    linked_drafters=("d",),
)


def directive(**plans: int) -> Directive:
    return Directive(
        plans={name: SpeculationPlan(draft_length=length) for name, length in plans.items()},
        default_plan=SpeculationPlan(draft_length=4),
        drafters=(DrafterEndpoint(drafter_id="d", endpoint="127.0.0.1:9", epoch=3),),
    )


async def test_before_the_plug_in_has_spoken_there_are_no_drafters(drafters: PluginsDrafters):
    assert drafters.complete(ENGINES) == ENGINES
    assert drafters.linked_drafters == ()


async def test_a_plug_in_that_asks_before_the_router_has_spoken_is_told_nothing(drafters: PluginsDrafters):
    assert await drafters.answer(PLUGINS) is None


async def test_each_tells_what_it_knows_better(drafters: PluginsDrafters):
    await drafters.answer(PLUGINS)
    found = drafters.complete(ENGINES)
    assert (found.verifier_id, found.load.num_running) == ("v0", 3)
    assert (found.load.price, found.load.knee, found.load.mean_step_s) == (0.4, 32.0, 0.1)
    assert (found.load.drafters, found.load.circuits) == (PLUGINS.load.drafters, PLUGINS.load.circuits)
    assert (found.linked_drafters, found.step_times) == (("d",), PLUGINS.step_times)
    counters = found.load.counters
    assert (counters.num_steps, counters.num_drafts, counters.num_accepted_tokens) == (100, 70, 200)
    assert (counters.num_asks, counters.num_stale_drafts, counters.fallbacks) == (80, 4, {"timeout": 2})


async def test_of_a_plug_in_that_fell_silent_only_counters_are_kept(drafters: PluginsDrafters, clock: Clock):
    await drafters.answer(PLUGINS)
    clock.now_s += FRESH_S
    found = drafters.complete(ENGINES)
    assert (found.linked_drafters, found.load.price, drafters.linked_drafters) == ((), None, ())
    assert found.load.counters.num_asks == 80, "counters never fall"


async def test_every_plan_reaches_the_plug_in_once_the_last_of_each_request(drafters: PluginsDrafters):
    for one in (directive(a=1, b=2), directive(b=0), directive()):
        await drafters.follow(one)
    assert await drafters.answer(PLUGINS) == directive(a=1, b=0)
    assert await drafters.answer(changed(PLUGINS, num_running=0)) == directive()
