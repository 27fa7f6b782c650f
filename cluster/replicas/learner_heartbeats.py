"""A drafter's heartbeats to its learner: samples and counts go there, the desired state comes back and is followed.

The drafter only pulls: one whose learner is dead or slow goes on with the weights that it has, and drops samples.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from outrider.cluster.common.reports import NoAnswerError
from outrider.cluster.gateway.internal_ids import client_id
from outrider.cluster.replicas.desired_state import Reconciler
from outrider.drafter_service.engine.learning_messages import (
    MAX_SAMPLE_BYTES,
    ServedSample,
    SetLearning,
    TakeTexts,
    TrialCounts,
    VersionCounts,
)
from outrider.drafter_service.engine.messages import DrafterUpdate
from outrider.drafter_service.learning.messages import FIRST_VERSION, DesiredState, DrafterVersion, Heartbeat, Texts
from outrider.verifier_service.messages.engine import ControlResult, UpdateDraftWeights

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
ANSWER_TIMEOUT_S = 5.0  # also how long a new drafter waits for the version to serve
MAX_HEARTBEAT_BYTES = 8 << 20
MAX_OUTBOX_BYTES = 64 << 20

ToEngine = SetLearning | TakeTexts | UpdateDraftWeights


class Outbox:
    """Samples on their way to the learner, the oldest first; where there is no room, the oldest go."""

    def __init__(self, max_bytes: int = MAX_OUTBOX_BYTES, *, max_sample_bytes: int = MAX_SAMPLE_BYTES) -> None:
        self._samples: collections.deque[ServedSample] = collections.deque()
        self._max_bytes, self._max_sample_bytes = max_bytes, max_sample_bytes
        self._num_bytes = 0
        self.num_dropped = 0

    def put(self, samples: Iterable[ServedSample]) -> None:
        for sample in samples:
            if sample.num_bytes > self._max_sample_bytes:
                self.num_dropped += 1
                continue
            self._samples.append(sample)
            self._num_bytes += sample.num_bytes
        while self._num_bytes > self._max_bytes:
            self._pop()
            self.num_dropped += 1

    def take(self, max_bytes: int) -> tuple[ServedSample, ...]:
        """Return the oldest samples of so many bytes together; one that is larger comes alone."""
        taken: list[ServedSample] = []
        num_bytes = 0
        while self._samples and (not taken or num_bytes + self._samples[0].num_bytes <= max_bytes):
            taken.append(self._pop())
            num_bytes += taken[-1].num_bytes
        return tuple(taken)

    def _pop(self) -> ServedSample:
        sample = self._samples.popleft()
        self._num_bytes -= sample.num_bytes
        return sample


class LearnerHeartbeats:
    """Brings samples and counts to the learner, and has the engine follow the desired state."""

    def __init__(
        self,
        drafter_id: str,
        *,
        own_folder: str,
        heartbeat: Callable[[Heartbeat], Awaitable[DesiredState | None]],
        control: Callable[[ToEngine], Awaitable[ControlResult]],
        clock: Callable[[], float],
        texts: Callable[[str], Awaitable[Texts | None]] | None = None,
        outbox: Outbox | None = None,
    ) -> None:
        """`heartbeat` and `texts` ask the learner, and raise `NoAnswerError`; None: it has not started.

        `own_folder`: of the weights that the drafter started with. `texts` is for drafters that look tokens up.
        `control` passes a message to the draft engine and raises `ConnectionError` if that is gone.
        """
        self._drafter_id = drafter_id
        self._heartbeat, self._texts, self._control = heartbeat, texts, control
        self._outbox = outbox or Outbox()
        self._own_folder = own_folder
        self._weights = Reconciler(control, self._update_to, clock, FIRST_VERSION)
        self._serving = FIRST_VERSION  # the last version that the engine took
        self._learning = SetLearning(call_id="")  # as the engine has it
        self._trial: TrialCounts | None = None
        self._versions: tuple[VersionCounts, ...] = ()
        self._shadow_error = ""
        self._num_dropped = 0  # by the engine, and with heartbeats that were not answered
        self._is_new = True
        self._is_answered = True

    def take(self, update: DrafterUpdate) -> None:
        """Keep what an update of the engine says until the next heartbeat."""
        self._outbox.put(replace(sample, request_id=client_id(sample.request_id)) for sample in update.samples)
        self._num_dropped += update.num_dropped_samples
        self._trial = update.trial or self._trial
        self._versions = update.versions or self._versions
        self._shadow_error = update.shadow_error or self._shadow_error

    async def run(self) -> None:
        """Send heartbeats, one after the other."""
        while True:
            await asyncio.sleep(HEARTBEAT_INTERVAL_S)
            await self.heartbeat_once()

    async def heartbeat_once(self) -> None:
        """Send one, and follow the answer. Raises nothing: without a learner, the drafter goes on as it is."""
        heartbeat = self._brought()
        try:
            desired = await self._heartbeat(heartbeat)
        except NoAnswerError as error:
            self._on_no_answer(heartbeat, str(error))
            return
        if desired is None:
            self._on_no_answer(heartbeat, "it has not started")
            return
        self._on_answer()
        try:
            await self._follow(desired)
            if heartbeat.is_new and self._texts is not None:
                await self._take_texts(self._texts)
        except (ConnectionError, NoAnswerError) as error:
            logger.warning("the learner's desired state was not reached: %s", error)

    def _brought(self) -> Heartbeat:
        """Return the next heartbeat; after one without an answer it brings no samples, but only asks."""
        samples = self._outbox.take(MAX_HEARTBEAT_BYTES) if self._is_answered else ()
        refusal = self._weights.refusal
        return Heartbeat(
            drafter_id=self._drafter_id,
            serving=self._serving.name,
            is_new=self._is_new,
            samples=samples,
            num_dropped=self._num_dropped + self._outbox.num_dropped,
            trial=self._trial,
            versions=self._versions,
            shadow_error=self._shadow_error,
            shadow=self._learning.shadow_version,
            serving_error="" if refusal is None else refusal.error,
            wanted="" if refusal is None else refusal.state.name,
        )

    def _on_no_answer(self, heartbeat: Heartbeat, reason: str) -> None:
        self._num_dropped += len(heartbeat.samples)  # whether they arrived is not known: none is brought twice
        if self._is_answered:
            logger.warning("the learner does not answer, its drafter goes on as it is: %s", reason)
        self._is_answered = False

    def _on_answer(self) -> None:
        if not self._is_answered:
            logger.warning("the learner answers again")
        self._is_new, self._is_answered = False, True
        self._num_dropped = self._outbox.num_dropped = 0

    def _folder_of(self, version: DrafterVersion) -> str:
        return version.folder or self._own_folder

    def _update_to(self, version: DrafterVersion) -> UpdateDraftWeights:
        return UpdateDraftWeights(call_id="", folder=self._folder_of(version), weight_version=version.name)

    async def _follow(self, desired: DesiredState) -> None:
        await self._weights.bring_to(desired.serving)
        self._serving = self._weights.state or self._serving
        shadow = desired.shadow
        learning = SetLearning(
            call_id="",
            sample_share=desired.sample_share,
            max_sample_tokens=desired.max_sample_tokens,
            shadow_folder="" if shadow is None else self._folder_of(shadow),
            shadow_version="" if shadow is None else shadow.name,
            shadow_share=0.0 if shadow is None else desired.shadow_share,
        )
        if learning == self._learning:
            return
        if learning.shadow_version != self._learning.shadow_version:
            self._trial, self._shadow_error = None, ""
        result = await self._control(replace(learning, call_id=_new_id()))
        self._learning = learning  # also if it was refused: the learner is told, and asks for something else
        self._shadow_error = result.error or self._shadow_error

    async def _take_texts(self, ask: Callable[[str], Awaitable[Texts | None]]) -> None:
        """Have the engine remember what the pool was told before the drafter came."""
        texts = await ask(self._drafter_id)
        for part in _parts(() if texts is None else texts.samples):
            result = await self._control(TakeTexts(call_id=_new_id(), samples=part))
            if result.error is not None:
                logger.warning("the drafter did not take the pool's texts: %s", result.error)


def _parts(samples: Sequence[ServedSample]) -> Iterator[tuple[ServedSample, ...]]:
    """Yield samples in their order, so many that a frame holds them."""
    rest = Outbox()
    rest.put(samples)
    while part := rest.take(MAX_HEARTBEAT_BYTES):
        yield part


def _new_id() -> str:
    return uuid.uuid4().hex
