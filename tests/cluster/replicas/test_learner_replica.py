"""A learner's shell, before a process that the test plays at the end of a real pipe."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas import learner_replica
from outrider.cluster.replicas.learner_replica import LearnerReplica
from outrider.drafter_service.engine.learning_messages import ServedSample
from outrider.drafter_service.learning.learner_spec import LearnerSpec
from outrider.drafter_service.learning.messages import (
    FIRST_VERSION,
    TO_LEARNER,
    Action,
    Answer,
    Ask,
    DesiredState,
    DrafterVersion,
    Heartbeat,
    LearnerReady,
    LearnerSettings,
    LearnerSettingsChange,
    LearnerStatus,
    LearnerUpdate,
    Reward,
    Texts,
)
from outrider.verifier_service.messages.wire import decode, encode

SAMPLE = ServedSample(request_id="r", token_ids=(1, 2, 3), num_prompt_tokens=1, states=b"\0" * 64)
STATUS = LearnerStatus(pool="default", serving="v3", num_samples=5)
DESIRED = DesiredState(serving=DrafterVersion(name="v3", folder="/l/v3"), sample_share=1.0)


class PlayedRanks:
    """A process that says what the test says."""

    last: PlayedRanks

    def __init__(self, spec: LearnerSpec, size: int, **options: Any) -> None:
        self.spec, self.size = spec, size
        self.near, self.process = Pipe()
        self.has_ended = False
        PlayedRanks.last = self

    async def connect(self) -> Connection:
        return self.near

    def ended(self) -> bool:
        return self.has_ended

    async def pids(self) -> list[int]:
        return [7]

    def stop(self) -> None:
        self.has_ended = True


class Closed(LearnerReplica):
    """A replica that its test closes: Serve awaits `__del__`, Python does not."""

    def __del__(self) -> None:
        """Do nothing more."""


class Reports:
    """The router's deployment handle."""

    def __init__(self) -> None:
        self.statuses: list[LearnerStatus] = []
        self.report_learner = self

    async def remote(self, status: LearnerStatus) -> None:
        self.statuses.append(status)


class Scene:
    def __init__(self, replica: LearnerReplica, reports: Reports) -> None:
        self.replica, self.reports, self.ranks = replica, reports, PlayedRanks.last

    async def say(self, message: Any) -> None:
        self.ranks.process.send_bytes(encode(message))
        await asyncio.sleep(0.03)

    async def start(self, **fields: Any) -> None:
        await self.say(LearnerReady(serving=FIRST_VERSION))
        await self.update(**fields)

    async def update(self, desired: DesiredState = DESIRED, status: LearnerStatus = STATUS, **fields: Any) -> None:
        await self.say(LearnerUpdate(desired=desired, status=status, **fields))

    async def hear(self) -> Any:
        async with asyncio.timeout(10):
            while not self.ranks.process.poll(0):
                await asyncio.sleep(0.01)
        return decode(self.ranks.process.recv_bytes(), TO_LEARNER)


@pytest.fixture
def options() -> dict[str, Any]:
    return {}


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: dict[str, Any]) -> AsyncIterator[Scene]:
    monkeypatch.setattr(learner_replica, "RankActors", PlayedRanks)
    learner = {"folder": str(tmp_path / "versions"), "num_steps": 7}
    config = ServiceConfig(learner=learner, device="cpu", **options)
    reports = Reports()
    replica: Any = object.__new__(Closed)
    await replica.__init__(config, reports, "default")
    yield Scene(replica, reports)
    await LearnerReplica.__del__(replica)


async def test_it_answers_while_its_process_starts_that_there_is_none(scene: Scene, tmp_path: Path):
    assert (scene.ranks.spec.folder, scene.ranks.size) == (str(tmp_path / "versions"), 1)
    assert Path(scene.ranks.spec.folder).is_dir()
    assert scene.ranks.spec.settings == LearnerSettings(num_steps=7)
    assert await scene.replica.heartbeat(Heartbeat(drafter_id="d", serving="v0")) is None
    answer = await scene.replica.ask(Action.PAUSE)
    assert answer.error == "the learner has not started"
    assert await scene.replica.status() is None
    await scene.replica.check_health()
    assert not scene.ranks.process.poll(0)


async def test_a_heartbeat_is_passed_on_and_answered_at_once_by_the_last_orders(scene: Scene):
    await scene.start()
    heartbeat = Heartbeat(drafter_id="d", serving="v0", is_new=True, samples=(SAMPLE,))
    assert await scene.replica.heartbeat(heartbeat) == DESIRED
    assert await scene.hear() == heartbeat
    later = DesiredState(serving=FIRST_VERSION)
    await scene.update(later)
    assert await scene.replica.heartbeat(heartbeat) == later
    assert await scene.replica.texts("d") is None, "its pool looks nothing up"


async def test_the_router_hears_what_it_is_at(scene: Scene):
    await scene.start()
    async with asyncio.timeout(10):
        while not scene.reports.statuses:
            await asyncio.sleep(0.05)
    assert scene.reports.statuses[0] == STATUS
    assert await scene.replica.status() == STATUS
    assert await scene.replica.rank_pids() == [7]


async def test_operators_get_the_answers_to_their_own_calls(scene: Scene):
    await scene.start()
    calls = [
        asyncio.ensure_future(scene.replica.ask(action, folder))
        for action, folder in ((Action.PAUSE, ""), (Action.EXPORT, "/out"))
    ]
    first, second = await scene.hear(), await scene.hear()
    assert [(ask.action, ask.folder) for ask in (first, second)] == [(Action.PAUSE, ""), (Action.EXPORT, "/out")]
    answers = (Answer(call_id=second.call_id, text="written"), Answer(call_id="of nobody", text="lost"))
    await scene.update(answers=answers)
    assert not calls[0].done()
    assert (await calls[1]).text == "written"
    await scene.update(answers=(Answer(call_id=first.call_id, error="it is paused already"),))
    assert (await calls[0]).error == "it is paused already"


async def test_a_call_that_is_not_answered_in_time_is_an_error(scene: Scene, monkeypatch: pytest.MonkeyPatch):
    await scene.start()
    answer = await scene.replica._shell.ask(Action.RESUME, timeout_s=0.05)
    assert answer.error == "the learner has not answered within 0.05 s"
    ask: Ask = await scene.hear()
    await scene.update(answers=(Answer(call_id=ask.call_id),))  # too late: nobody is disturbed
    await scene.replica.check_health()


async def test_rewards_reach_the_process_one_by_one(scene: Scene):
    await scene.start()
    await scene.replica.reward({"a": 1.0, "b-1": -0.5})
    assert [await scene.hear(), await scene.hear()] == [
        Reward(request_id="a", reward=1.0),
        Reward(request_id="b-1", reward=-0.5),
    ]


async def test_settings_change_while_it_runs_and_before_it_does(scene: Scene):
    scene.replica.reconfigure({"min_samples": 3})
    await scene.start()
    assert await scene.hear() == LearnerSettingsChange(settings=LearnerSettings(num_steps=7, min_samples=3))
    scene.replica.reconfigure({"num_steps": 9})
    assert await scene.hear() == LearnerSettingsChange(settings=LearnerSettings(num_steps=9)), "the rest as configured"
    with pytest.raises(ValueError, match="did you mean 'num_steps'"):
        scene.replica.reconfigure({"nmu_steps": 1})
    with pytest.raises(ValueError, match="max_bytes holds from the learner's start"):
        scene.replica.reconfigure({"max_bytes": 1})
    scene.replica.reconfigure({"num_steps": 9})
    assert not scene.ranks.process.poll(0.05), "nothing has changed"


async def test_a_process_that_ends_is_unhealthy_and_who_waits_is_told(scene: Scene):
    await scene.start()
    call = asyncio.ensure_future(scene.replica.ask(Action.PAUSE))
    await scene.hear()
    scene.ranks.process.close()
    answer = await call
    assert answer.error is not None
    assert "the learner has failed: engine process is gone" in answer.error
    with pytest.raises(RuntimeError, match="engine process is gone"):
        await scene.replica.check_health()
    with pytest.raises(ConnectionError):
        await scene.replica.heartbeat(Heartbeat(drafter_id="d", serving="v0"))


async def test_a_process_that_does_not_start_is_unhealthy(scene: Scene):
    scene.ranks.process.close()
    await asyncio.sleep(0.1)
    with pytest.raises(RuntimeError, match="start the learner and report"):
        await scene.replica.check_health()


@pytest.mark.parametrize("options", [{"speculative_config": {"method": "suffix"}}])
async def test_a_new_look_up_gets_the_pools_texts_in_time_or_none(scene: Scene):
    await scene.start()
    texts = Texts(drafter_id="d", samples=(SAMPLE,))
    await scene.replica.heartbeat(Heartbeat(drafter_id="d", serving="v0", is_new=True))
    await scene.hear()
    await scene.update(texts=(texts, Texts(drafter_id="gone", samples=())))
    assert await scene.replica.texts("d") == texts, "also those that came before they were asked for"
    assert await scene.replica.texts("d") is None
    await scene.replica.heartbeat(Heartbeat(drafter_id="d", serving="v0", is_new=True))
    assert await scene.replica._shell.texts("d", timeout_s=0.05) is None
