"""A pool's learner as a Serve replica: the shell in front of the process that trains."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from outrider.cluster.config.placement import LEARNER_CPUS
from outrider.cluster.config.pools_config import PoolsConfig
from outrider.cluster.replicas.rank_actors import RankActors
from outrider.cluster.replicas.replica_base import ReplicaBase
from outrider.drafter_service.learning.folder_lock import require_free
from outrider.drafter_service.learning.messages import (
    FROM_LEARNER,
    Action,
    Answer,
    Ask,
    DesiredState,
    Heartbeat,
    LearnerReady,
    LearnerSettings,
    LearnerSettingsChange,
    LearnerStatus,
    LearnerUpdate,
    Reward,
    Texts,
)
from outrider.drafter_service.service.methods import Kind
from outrider.verifier_service.links.control_table import ControlTable

ENGINE_TIMEOUT_S = 120.0  # of silence: on busy cores, a step or a file of the idle class takes tens of seconds
ANSWER_TIMEOUT_S = 60.0  # of an operator's call, which may copy weights
START_TIMEOUT_S = 900.0  # it loads target and drafter where nothing else runs
TEXTS_TIMEOUT_S = 4.0  # a new drafter waits for them

ToLearner = Heartbeat | Reward | Ask | LearnerSettingsChange


class LearnerShell:
    """What a learner's process said last, and who waits for what it will say."""

    def __init__(self, send: Callable[[ToLearner], None], settings: LearnerSettings) -> None:
        """`send` passes a message to the process; raises `ConnectionError` if that is gone."""
        self._send = send
        self._settings, self._told = settings, settings  # the process starts with the first
        self._last: LearnerUpdate | None = None
        self._calls: ControlTable[Answer] = ControlTable(send)
        self.fail = self._calls.fail
        self._texts: dict[str, asyncio.Future[Texts]] = {}  # by drafter

    @property
    def status(self) -> LearnerStatus | None:
        """None: the process has not said."""
        return None if self._last is None else self._last.status

    def take(self, update: LearnerUpdate) -> None:
        """Keep what the process says, and pass answers to those who wait."""
        if self._last is None:
            self._settle()
        self._last = update
        self._calls.deliver(update.answers)
        for texts in update.texts:
            future = self._texts.get(texts.drafter_id)
            if future is not None and not future.done():
                future.set_result(texts)

    def heartbeat(self, heartbeat: Heartbeat, *, with_texts: bool = False) -> DesiredState | None:
        """Pass a drafter's heartbeat on; return the last desired state. None: the process has not started.

        `with_texts`: the drafter will ask for `texts`. Raises `ConnectionError` if the process is gone.
        """
        if self._last is None:
            return None
        if with_texts:
            self._texts[heartbeat.drafter_id] = asyncio.get_running_loop().create_future()
        self._send(heartbeat)
        return self._last.desired

    async def texts(self, drafter_id: str, timeout_s: float = TEXTS_TIMEOUT_S) -> Texts | None:
        """Return the texts for a drafter that has just started; None: there are none in time."""
        future = self._texts.get(drafter_id)
        if future is None:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return None
        finally:
            self._texts.pop(drafter_id, None)

    async def ask(self, action: Action, folder: str = "", timeout_s: float = ANSWER_TIMEOUT_S) -> Answer:
        """Return what the process answers to an operator; an error also if it answers nothing in time."""
        call_id = uuid.uuid4().hex
        if self._last is None:
            return Answer(call_id=call_id, error="the learner has not started")
        try:
            async with asyncio.timeout(timeout_s):
                return await self._calls.call(Ask(call_id=call_id, action=action, folder=folder))
        except TimeoutError:
            return Answer(call_id=call_id, error=f"the learner has not answered within {timeout_s:g} s")
        except ConnectionError as error:
            return Answer(call_id=call_id, error=f"the learner has failed: {error}")

    def reward(self, rewards: Mapping[str, float]) -> None:
        """Pass a trainer's rewards on, by request ids; raises `ConnectionError` if there is no process."""
        for request_id, reward in rewards.items():
            self._send(Reward(request_id=request_id, reward=reward))

    def change(self, settings: LearnerSettings) -> None:
        """Have the process go on with other settings, also once it has started anew."""
        self._settings = settings
        if self._last is not None:
            self._settle()

    def _settle(self) -> None:
        if self._settings != self._told:
            self._send(LearnerSettingsChange(settings=self._settings))
            self._told = self._settings


class LearnerReplica(ReplicaBase):
    """The learner of one pool. It answers at once, also while its process starts: then that there is none."""

    report_interval_s = 0.5  # nothing is decided by it

    async def __init__(self, config: PoolsConfig, router: Any, pool: str) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(config, router.report_learner, name=f"learner/{pool}", timeout_s=ENGINE_TIMEOUT_S)
        options = config.pools[pool]
        spec, placement = config.learner_spec_of(options), config.learner_placement(options)
        assert options.learner is not None
        self._options = options.learner
        self._looks_up = options.speculative.has(Kind.LOOKUP)
        self._shell = LearnerShell(self._host.send, spec.settings)
        self._is_started = False
        # one that cannot be written, or is another learner's, is known at once
        await asyncio.to_thread(require_free, Path(spec.folder))
        ranks = RankActors(
            spec,
            placement.num_ranks,
            num_gpus=placement.gpus_per_rank,
            num_cpus=LEARNER_CPUS,
            timeout_s=START_TIMEOUT_S,
        )
        self._host.tasks.start(self._live(ranks), "start the learner and report")

    def _on_update(self, update: LearnerUpdate) -> None:
        self._shell.take(update)

    def _on_failure(self, reason: str) -> None:
        self._shell.fail(reason)

    def _report(self) -> LearnerStatus | None:
        return self._shell.status

    async def _live(self, ranks: RankActors) -> None:
        """Wait for the process, then tell the router what it is at while it lives."""
        ready = await self._host.start(ranks, FROM_LEARNER)
        assert isinstance(ready, LearnerReady)
        self._is_started = True
        await self._report_forever()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change the learner's settings: those that `user_config` does not name are as configured at start.

        Serve calls this at start and whenever a deployed `user_config` changes, without a restart. Raises `ValueError`
        naming the setting, and keeps the old ones.
        """
        self._shell.change(self._options.changed_settings(user_config))

    async def heartbeat(self, heartbeat: Heartbeat) -> DesiredState | None:
        """Take what a drafter brings; return what it shall do. None: the process has not started."""
        return self._shell.heartbeat(heartbeat, with_texts=heartbeat.is_new and self._looks_up)

    async def texts(self, drafter_id: str) -> Texts | None:
        return await self._shell.texts(drafter_id)

    async def ask(self, action: Action, folder: str = "") -> Answer:
        """Do what an operator asks."""
        return await self._shell.ask(action, folder)

    async def reward(self, rewards: Mapping[str, float]) -> None:
        self._shell.reward(rewards)

    async def status(self) -> LearnerStatus | None:
        return self._shell.status

    async def check_health(self) -> None:
        """Raise if the learner is gone: Serve then starts it anew, and the folder has its versions."""
        if self._is_started:
            await super().check_health()
        else:
            self._host.tasks.check()
