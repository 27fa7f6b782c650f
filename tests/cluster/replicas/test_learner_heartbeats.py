"""A drafter's heartbeats: what it brings, what it does of what it is told, and that a learner can do it no harm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outrider.cluster.common.reports import NoAnswerError
from outrider.cluster.replicas import learner_heartbeats
from outrider.cluster.replicas.desired_state import FIRST_RETRY_S
from outrider.cluster.replicas.learner_heartbeats import LearnerHeartbeats, Outbox, ToEngine
from outrider.drafter_service.engine.learning_messages import (
    ServedSample,
    SetLearning,
    TakeTexts,
    TrialCounts,
    VersionCounts,
)
from outrider.drafter_service.engine.messages import DrafterUpdate
from outrider.drafter_service.learning.messages import DesiredState, DrafterVersion, Heartbeat, Texts
from outrider.verifier_service.messages.engine import ControlResult, UpdateDraftWeights

V1 = DrafterVersion(name="v1", folder="/learner/v1")
V2 = DrafterVersion(name="v2", folder="/learner/v2")
OWN_FOLDER = "/models/draft"
TRIAL = TrialCounts(serving="v0", shadow="v1", num_rounds=5, serving_score=4.0, shadow_score=6.0)


def sample(request_id: str = "g/7/cmpl-1", num_tokens: int = 8) -> ServedSample:
    return ServedSample(request_id=request_id, token_ids=tuple(range(num_tokens)), num_prompt_tokens=2)


class Scene:
    """A drafter between a learner and an engine that the test plays."""

    def __init__(self, *, looks_up: bool = False, outbox: Outbox | None = None) -> None:
        self.desired: DesiredState | None = DesiredState()  # None: it has not started
        self.is_dead = False
        self.heartbeats: list[Heartbeat] = []
        self.sent: list[ToEngine] = []
        self.refuse: Callable[[ToEngine], str | None] = lambda message: None
        self.texts: Texts | None = None
        self.now_s = 0.0
        self.drafter = LearnerHeartbeats(
            "d",
            own_folder=OWN_FOLDER,
            heartbeat=self._heartbeat,
            texts=self._texts if looks_up else None,
            control=self._control,
            clock=lambda: self.now_s,
            outbox=outbox,
        )

    async def _heartbeat(self, heartbeat: Heartbeat) -> DesiredState | None:
        self.heartbeats.append(heartbeat)
        if self.is_dead:
            raise NoAnswerError("TimeoutError: ")
        return self.desired

    async def _texts(self, drafter_id: str) -> Texts | None:
        assert drafter_id == "d"
        return self.texts

    async def _control(self, message: ToEngine) -> ControlResult:
        self.sent.append(message)
        return ControlResult(call_id=message.call_id, error=self.refuse(message))

    async def heartbeat(self, **desired: Any) -> Heartbeat:
        """Have the drafter heartbeat; return what it brought."""
        self.desired = None if self.desired is None else replace(self.desired, **desired)
        await self.drafter.heartbeat_once()
        return self.heartbeats[-1]

    def take(self, *samples: ServedSample, **fields: Any) -> None:
        self.drafter.take(DrafterUpdate(samples=samples, **fields))

    @property
    def swaps(self) -> list[tuple[str, str | None]]:
        found = [message for message in self.sent if isinstance(message, UpdateDraftWeights)]
        return [(message.folder, message.weight_version) for message in found]

    @property
    def told(self) -> list[SetLearning]:
        return [replace(message, call_id="") for message in self.sent if isinstance(message, SetLearning)]


async def test_a_heartbeat_brings_what_the_engine_said_and_samples_once():
    scene = Scene()
    versions = (VersionCounts(version="v0", num_rounds=3),)
    scene.take(sample(), sample("h/0/id/with/slashes-1"), trial=TRIAL, versions=versions, shadow_error="no")
    first = await scene.heartbeat()
    assert (first.drafter_id, first.serving, first.is_new, first.num_dropped) == ("d", "v0", True, 0)
    assert [each.request_id for each in first.samples] == ["cmpl-1", "id/with/slashes-1"], "as the client knows them"
    assert (first.trial, first.versions, first.shadow_error) == (TRIAL, versions, "no")
    scene.take(num_dropped_samples=2)  # an update without other news
    second = await scene.heartbeat()
    assert (second.is_new, second.samples, second.num_dropped) == (False, (), 2)
    assert (second.trial, second.versions) == (TRIAL, versions), "counts are sums: they are said again"


async def test_the_engine_is_told_only_what_changed():
    scene = Scene()
    await scene.heartbeat()
    assert scene.sent == [], "the version and the settings that it started with"
    await scene.heartbeat(sample_share=0.5, max_sample_tokens=64)
    await scene.heartbeat()
    assert scene.told == [SetLearning(call_id="", sample_share=0.5, max_sample_tokens=64)]
    await scene.heartbeat(shadow=V1, shadow_share=0.25)
    await scene.heartbeat()
    shadowed = SetLearning(
        call_id="",
        sample_share=0.5,
        max_sample_tokens=64,
        shadow_folder=V1.folder,
        shadow_version="v1",
        shadow_share=0.25,
    )
    assert scene.told[1:] == [shadowed]
    assert scene.swaps == []
    assert len({message.call_id for message in scene.sent}) == len(scene.sent)


async def test_a_published_version_is_served_and_its_predecessor_may_be_the_one_it_began_with():
    scene = Scene()
    await scene.heartbeat(serving=V1, shadow=DrafterVersion(name="v0"), shadow_share=0.25)
    assert scene.swaps == [(V1.folder, "v1")]
    assert [type(message) for message in scene.sent] == [UpdateDraftWeights, SetLearning]
    assert (scene.told[0].shadow_folder, scene.told[0].shadow_version) == (OWN_FOLDER, "v0")
    assert (await scene.heartbeat()).serving == "v1"
    await scene.heartbeat(serving=DrafterVersion(name="v0"), shadow=None)
    assert scene.swaps[1:] == [(OWN_FOLDER, "v0")], "rolled back"
    assert scene.told[-1].shadow_folder == ""


async def test_counts_of_a_trial_end_with_it():
    scene = Scene()
    await scene.heartbeat(shadow=V1)
    scene.take(trial=TRIAL)
    assert (await scene.heartbeat()).trial == TRIAL
    await scene.heartbeat(shadow=V2)
    assert (await scene.heartbeat()).trial is None


async def test_a_shadow_that_cannot_be_loaded_is_told_until_other_orders_come():
    scene = Scene()
    scene.refuse = lambda message: "another shape" if isinstance(message, SetLearning) else None
    await scene.heartbeat(shadow=V1)
    told = await scene.heartbeat()
    assert (told.shadow_error, told.shadow) == ("another shape", "v1")
    assert len(scene.told) == 1, "it would be refused again"
    scene.refuse = lambda message: None
    await scene.heartbeat(shadow=None)
    assert (await scene.heartbeat()).shadow_error == ""


async def test_refused_weights_are_told_and_the_version_before_is_loaded_anew():
    """After some kinds of errors the engine has a part of either."""
    scene = Scene()
    scene.refuse = lambda message: "cut off" if getattr(message, "folder", "") == V1.folder else None
    await scene.heartbeat(serving=V1)
    told = await scene.heartbeat()
    assert (told.serving, told.serving_error, told.wanted) == ("v0", "cut off", "v1")
    await scene.heartbeat(serving=DrafterVersion(name="v0"))
    assert scene.swaps == [(V1.folder, "v1"), (OWN_FOLDER, "v0")]
    whole = await scene.heartbeat()
    assert (whole.serving, whole.serving_error, whole.wanted) == ("v0", "", "")
    assert len(scene.swaps) == 2


async def test_refused_weights_that_are_still_ordered_are_tried_again_ever_more_seldom():
    scene = Scene()
    scene.refuse = lambda message: "no such folder"
    scene.desired = DesiredState(serving=V1)
    times = []
    for _ in range(200):
        before = len(scene.swaps)
        await scene.drafter.heartbeat_once()
        times += [scene.now_s] * (len(scene.swaps) - before)
        scene.now_s += 1.0
    assert times == [0.0, FIRST_RETRY_S, 6.0, 14.0, 30.0, 62.0, 122.0, 182.0]
    await scene.heartbeat(serving=V2)
    assert scene.swaps[-1] == (V2.folder, "v2"), "another one at once"
    scene.refuse = lambda message: None
    scene.now_s += FIRST_RETRY_S
    await scene.heartbeat()
    assert (await scene.heartbeat()).serving == "v2"


async def test_a_swap_whose_end_was_not_awaited_is_done_again():
    scene = Scene()
    control, waits = scene.drafter._weights._control, asyncio.Event()

    async def hang(message: ToEngine) -> ControlResult:
        await control(message)
        await waits.wait()
        raise AssertionError

    scene.drafter._weights._control = hang
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await scene.heartbeat(serving=V1)
    scene.drafter._weights._control = control
    await scene.heartbeat()
    assert scene.swaps == [(V1.folder, "v1")] * 2


async def test_a_learner_that_does_not_answer_is_said_once_and_loses_one_heartbeats_samples(caplog: Any):
    caplog.set_level(logging.WARNING, logger=learner_heartbeats.__name__)
    scene = Scene()
    scene.is_dead = True
    scene.take(sample("a"), sample("b"))
    assert len((await scene.heartbeat()).samples) == 2
    scene.take(sample("c"))
    for _ in range(5):
        assert (await scene.heartbeat()).samples == (), "only asked: what is sent to the dead is lost"
    assert len(caplog.records) == 1
    scene.is_dead = False
    back = await scene.heartbeat()
    assert (back.is_new, back.samples, back.num_dropped) == (True, (), 2), "it has never answered"
    last = await scene.heartbeat()
    assert ([each.request_id for each in last.samples], last.num_dropped, last.is_new) == (["c"], 0, False)
    assert len(caplog.records) == 2
    assert scene.sent == []


async def test_while_the_learner_starts_its_drafter_is_new_and_keeps_its_samples():
    scene = Scene()
    scene.desired = None
    await scene.heartbeat()
    scene.take(sample("a"))
    assert (await scene.heartbeat()).samples == ()
    scene.desired = DesiredState(serving=V1)
    assert (await scene.heartbeat()).is_new
    assert scene.swaps == [(V1.folder, "v1")]
    assert [each.request_id for each in (await scene.heartbeat()).samples] == ["a"]


async def test_an_engine_that_is_gone_is_its_replicas_matter():
    scene = Scene()

    def gone(message: ToEngine) -> str | None:
        raise ConnectionError("the engine is gone")

    scene.refuse = gone
    await scene.heartbeat(serving=V1)
    await scene.heartbeat()
    assert len(scene.swaps) == 2


async def test_a_new_drafter_that_looks_tokens_up_takes_the_pools_texts_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_heartbeats, "MAX_HEARTBEAT_BYTES", 100)
    scene = Scene(looks_up=True)
    scene.texts = Texts(drafter_id="d", samples=tuple(sample(str(index)) for index in range(7)))
    await scene.heartbeat()
    taken = [message for message in scene.sent if isinstance(message, TakeTexts)]
    assert [len(message.samples) for message in taken] == [3, 3, 1], "as many as a frame holds"
    assert [each.request_id for message in taken for each in message.samples] == [str(index) for index in range(7)]
    await scene.heartbeat()
    assert len(scene.sent) == 3


async def test_without_texts_a_look_up_begins_empty():
    scene = Scene(looks_up=True)
    await scene.heartbeat()
    assert scene.sent == []


def test_an_outbox_holds_so_many_bytes_and_the_newest_samples():
    size = sample().num_bytes
    outbox = Outbox(5 * size, max_sample_bytes=2 * size)
    outbox.put(sample(str(index)) for index in range(8))
    assert outbox.num_dropped == 3
    outbox.put([sample("large", num_tokens=24)])
    assert outbox.num_dropped == 4, "it fits no frame"
    assert [each.request_id for each in outbox.take(2 * size)] == ["3", "4"]
    assert [each.request_id for each in outbox.take(size - 1)] == ["5"], "at least one"
    assert [each.request_id for each in outbox.take(9 * size)] == ["6", "7"]
    assert outbox.take(size) == ()


async def test_what_fits_no_outbox_is_counted():
    scene = Scene(outbox=Outbox(2 * sample().num_bytes))
    scene.take(*(sample(str(index)) for index in range(5)))
    heartbeat = await scene.heartbeat()
    assert (len(heartbeat.samples), heartbeat.num_dropped) == (2, 3)
    assert (await scene.heartbeat()).num_dropped == 0


async def test_heartbeats_come_about_once_a_second(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner_heartbeats, "HEARTBEAT_INTERVAL_S", 0.01)
    scene = Scene()
    scene.is_dead = True
    running = asyncio.ensure_future(scene.drafter.run())
    async with asyncio.timeout(10):
        while len(scene.heartbeats) < 3:
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()
