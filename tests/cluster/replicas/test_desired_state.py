"""A late verifier takes the fleet's weights, once, and not over weights that a trainer gave it; it pauses as others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from fakes.reports import IDLE
from outrider.cluster.replicas.desired_state import FIRST_RETRY_S, fleet_pause, fleet_weights
from outrider.cluster.router.fleet import FleetPause, FleetWeights
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import (
    AskState,
    ContinueGeneration,
    Control,
    ControlResult,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
)

WEIGHTS = FleetWeights(version="7", taken_s=100.0, folder="/w/7")


class Played:
    """An engine that the test answers for."""

    def __init__(self) -> None:
        self.calls: list[Control] = []
        self.load = IDLE
        self.control = ControlTable(self.calls.append)
        self.now_s = 0.0
        self.missed = fleet_weights(self.control, lambda: self.load, lambda: self.now_s)
        self.pause = fleet_pause(self.control, lambda: self.now_s)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def answers(self, error: str | None = None) -> None:
        self.control.deliver([ControlResult(call_id=self.calls[-1].call_id, error=error)])
        await self.settle()


@pytest.fixture
async def engine() -> AsyncIterator[Played]:
    played = Played()
    tasks = [asyncio.create_task(missed.run()) for missed in (played.missed, played.pause)]
    yield played
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_it_takes_what_it_missed_and_tries_again_after_an_error(engine: Played):
    engine.missed.want(None)
    await engine.settle()
    assert engine.calls == []
    engine.missed.want(WEIGHTS)
    await engine.settle()
    (call,) = engine.calls
    assert isinstance(call, UpdateWeights)
    assert (call.folder, call.weight_version) == ("/w/7", "7")
    for _ in range(5):  # directives of reports that were sent meanwhile
        engine.missed.want(WEIGHTS)
    engine.load = replace(IDLE, weights_taken_s=0.0)
    await engine.answers(error="no such folder")
    assert len(engine.calls) == 1, "it has just refused"
    engine.now_s = FIRST_RETRY_S
    engine.missed.want(WEIGHTS)
    await engine.settle()
    assert len(engine.calls) == 2
    engine.load = replace(IDLE, weights_taken_s=101.0)
    await engine.answers()
    for known in (WEIGHTS, replace(WEIGHTS, version="6")):  # a trainer's are newer than what the directive knows
        engine.missed.want(known)
        await engine.settle()
    assert len(engine.calls) == 2


async def test_it_leaves_a_verifier_alone_that_is_being_given_weights(engine: Played):
    asking = asyncio.create_task(engine.control.call(AskState(call_id="trainer")))
    await engine.settle()
    engine.missed.want(WEIGHTS)
    await engine.settle()
    assert engine.calls == [AskState(call_id="trainer")]
    await engine.answers()
    await asking


async def test_it_pauses_and_goes_on_as_the_fleet_does_beside_taking_weights(engine: Played):
    engine.missed.want(WEIGHTS)
    for pause in (None, FleetPause(asked_s=5.0, is_paused=True, lease_left_s=3.0)):
        engine.pause.want(pause)
    await engine.settle()
    taking, pausing = engine.calls
    assert isinstance(taking, UpdateWeights)
    assert pausing == PauseGeneration(call_id=pausing.call_id, mode=PauseMode.KEEP, lease_s=3.0, asked_s=5.0)
    await engine.answers(error="half of an update is here")
    engine.pause.want(FleetPause(asked_s=6.0, is_paused=False))
    await engine.settle()
    goes_on = engine.calls[-1]
    assert goes_on == ContinueGeneration(call_id=goes_on.call_id, asked_s=6.0)
