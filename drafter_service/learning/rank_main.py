"""Run a learner in its own process: drafters' heartbeats in, the desired state out, over one pipe; training in between.

Without a GPU, training is in the system's idle class: it takes what serving leaves of the cores. What an operator asks
does not wait for spare time: it is done in the usual class, and so is the rest of a training step that it finds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from outrider.drafter_service.learning.folder_lock import own_folder
from outrider.drafter_service.learning.learner import Learner
from outrider.drafter_service.learning.learner_spec import LearnerSpec
from outrider.drafter_service.learning.messages import (
    TO_LEARNER,
    Answer,
    Ask,
    DesiredState,
    Heartbeat,
    LearnerReady,
    LearnerSettingsChange,
    LearnerUpdate,
    Reward,
)
from outrider.drafter_service.learning.online_training import StudentTraining
from outrider.drafter_service.learning.reservoir import Reservoir
from outrider.drafter_service.learning.students import StudentMaker
from outrider.drafter_service.learning.version_registry import VersionRegistry, digest_of
from outrider.drafter_service.service.methods import Kind
from outrider.verifier_service.engine.control import Message, Result, change_beside
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.ranks import RankSpec, arrived, connect
from outrider.verifier_service.model.settled import resolve_device
from outrider.verifier_service.start_phases import tell_phase

logger = logging.getLogger(__name__)

UPDATE_INTERVAL_S = 0.2
ToLearner = Heartbeat | Reward | Ask | LearnerSettingsChange


def run_learner_rank(spec: LearnerSpec, rank: RankSpec) -> None:
    """Run a pool's learner until its shell is gone."""
    device = resolve_device(spec.device)
    torch.set_num_threads(spec.num_threads)
    shell = connect(rank.shell_address)
    with own_folder(Path(spec.folder)):
        learner = build_learner(spec, device)
        shell.send_bytes(encode(LearnerReady(serving=learner.desired.serving)))
        tell_phase("ready")
        LearnerLoop(learner, shell, clock=time.monotonic, yields=device.type == "cpu").run()


def build_learner(spec: LearnerSpec, device: torch.device) -> Learner:
    """Build a learner, which has read what serves. Raises `ValueError` for a folder that is no registry."""
    speculative = spec.drafter.speculative
    training: StudentTraining | None = None
    if speculative.weighted_methods:
        training = StudentTraining(StudentMaker(spec.drafter, device), device=device, seed=spec.seed)
    origin = "" if training is None else digest_of(training.first_folder())
    return Learner(
        pool=spec.pool,
        registry=VersionRegistry(Path(spec.folder), origin),
        reservoir=Reservoir(spec.max_bytes),
        training=training,
        settings=spec.settings,
        brings_texts=speculative.has(Kind.LOOKUP),
        clock=time.monotonic,
        cpu_clock=time.process_time,
        export_root=Path(spec.export_root),
        weights_root=spec.weights_root,
    )


def yield_to_others() -> None:
    """Put this thread, and threads that it starts later, in the system's idle class, where there is one."""
    if hasattr(os, "SCHED_IDLE"):
        with contextlib.suppress(PermissionError):  # a sandbox may forbid it
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def threads() -> set[int]:
    """Return the threads of this process; none where the system does not say (Linux does)."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()


def hurry(numbers: Iterable[int]) -> None:
    """Put threads in the usual class."""
    for number in numbers:
        with contextlib.suppress(PermissionError, ProcessLookupError):  # it may have ended
            os.sched_setscheduler(number, os.SCHED_OTHER, os.sched_param(0))


class LearnerLoop:
    """Pass messages between the pipe and the learner, piece of work by piece."""

    def __init__(self, learner: Learner, pipe: Connection, *, clock: Callable[[], float], yields: bool = False) -> None:
        """`yields`: training takes only the time that nobody else wants."""
        self._learner, self._pipe, self._clock, self._yields = learner, pipe, clock, yields
        self._came: list[ToLearner] = []  # while something took long
        self._answers: list[Answer] = []
        self._told: DesiredState | None = None
        self._next_update_s = 0.0

    def run(self) -> None:
        """Work until the shell closes the pipe."""
        with contextlib.suppress(EOFError, ConnectionError):  # the shell is gone
            while True:
                patience_s = 0.0 if self._learner.has_work() or self._came else UPDATE_INTERVAL_S
                messages, self._came = [*self._came, *self._read(patience_s)], []
                for message in messages:
                    self._take(message)
                self._tell(self._learner.desired)
                if self._learner.has_work():
                    self._beside(self._step, None)

    def _read(self, patience_s: float) -> Iterator[ToLearner]:
        return (decode(frame, TO_LEARNER) for frame in arrived(self._pipe, patience_s))

    def _step(self, _: object) -> None:
        if self._yields:
            yield_to_others()
        self._learner.step()

    def _take(self, message: ToLearner) -> None:
        match message:
            case Heartbeat():
                self._learner.heartbeat(message)
            case Reward():
                try:
                    self._learner.reward(message)
                except ValueError as error:
                    logger.warning("a reward was left out: %s", error)
            case LearnerSettingsChange():
                self._learner.change_settings(message.settings)
            case Ask():
                answer = self._beside(self._learner.handle, message)
                self._answers.append(answer)  # not in one line: meanwhile, `_tell` begins a new list

    def _beside(self, work: Callable[[Message], Result], message: Message) -> Result:
        """Do what may take long on a thread, and return its result; what drafters shall do stays as it is meanwhile."""
        desired, others = self._learner.desired, threads()

        def meanwhile() -> None:
            self._came += self._read(0.0)
            if any(isinstance(each, Ask) for each in self._came):
                hurry(threads() - others)  # the work's thread, and those that torch has started for it
            self._tell(desired)

        return change_beside(work, message, meanwhile, UPDATE_INTERVAL_S)

    def _tell(self, desired: DesiredState) -> None:
        """Say what has changed at once, and the rest from time to time."""
        texts, now_s = self._learner.take_texts(), self._clock()
        if not (self._answers or texts or desired != self._told or now_s >= self._next_update_s):
            return
        answers, self._answers = tuple(self._answers), []
        update = LearnerUpdate(desired=desired, status=self._learner.status, answers=answers, texts=texts)
        self._pipe.send_bytes(encode(update))
        self._told, self._next_update_s = desired, now_s + UPDATE_INTERVAL_S
