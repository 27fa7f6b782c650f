"""What a trainer asks of an engine between two steps: pause, go on, flush, new weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol, TypeVar

from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.engine import (
    AskState,
    ContinueGeneration,
    Control,
    ControlResult,
    DestroyWeightsGroup,
    FlushCache,
    PauseGeneration,
    PauseMode,
    UpdateDraftWeights,
    UpdateWeights,
    WeightChange,
)
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput
from outrider.verifier_service.refit.rank_weights import BrokenWeightsError

logger = logging.getLogger(__name__)

ChangeDraft = Callable[[UpdateDraftWeights], ControlResult]  # of the drafter in the engine's process
Message = TypeVar("Message")
Result = TypeVar("Result")
ONE_AT_A_TIME = "another change of the weights goes on; the end of its group breaks off what comes from a trainer"


class Weights(Protocol):
    """The model's weights: see `RankWeights`. A change begins, and is finished between two later steps."""

    digest: str
    missing: tuple[str, ...]  # what an update lacks that is half here

    @property
    def is_ready(self) -> bool: ...

    def begin(self, message: WeightChange) -> None: ...

    def finish(self, *, is_abandoned: bool = False) -> int: ...


class EngineControl:
    """Handles control messages. A pause in mode `wait` holds new requests back here until the others have finished."""

    def __init__(
        self,
        engine: VerifierEngine,
        weights: Weights | None = None,
        change_draft: ChangeDraft | None = None,
        *,
        takes_orders: bool = True,
        clock: Callable[[], float] = time.monotonic,
        report: Callable[[], None] = lambda: None,
        report_interval_s: float = 1.0,
    ) -> None:
        """Without `weights`, they cannot change. `change_draft`: changes those of the drafter in this process.

        `takes_orders`: a trainer is served; otherwise every call is refused. `report` is called every
        `report_interval_s` while a change lasts: an engine that is silent is given up.
        """
        self._engine, self._weights, self._change_draft = engine, weights, change_draft
        self.takes_orders, self._clock = takes_orders, clock
        self._report, self._report_interval_s = report, report_interval_s
        self._changing: WeightChange | None = None  # a change that has begun
        self._waiting: PauseGeneration | None = None  # a pause that begins when all requests have finished
        self._held: dict[str, GenerationRequest] = {}
        self._results: list[ControlResult] = []
        self._num_missing = 0  # tensors of an update that is half here

    @property
    def is_changing(self) -> bool:
        """Whether a change of the weights goes on beside steps."""
        return self._changing is not None

    @property
    def is_ready(self) -> bool:
        """Whether that change can be finished, with no step in flight."""
        return self._changing is not None and self._weights is not None and self._weights.is_ready

    @property
    def num_held(self) -> int:
        return len(self._held)

    def take_results(self) -> tuple[ControlResult, ...]:
        """Return the answers to calls since the last time."""
        results, self._results = tuple(self._results), []
        return results

    def hold(self, message: GenerationRequest) -> bool:
        """Keep a new request back if the engine waits for the others to finish; return whether it does."""
        if self._waiting is None:
            return False
        self._held[message.request_id] = message
        return True

    def drop(self, request_id: str) -> None:
        """Forget a request that is held back, if it is."""
        self._held.pop(request_id, None)

    def settle(self) -> list[RequestOutput]:
        """Begin the pause that waited for requests once all have finished; end one whose lease is over.

        Return refusals of requests that were held back.
        """
        ends_s = self._engine.pause_ends_s
        if ends_s is not None and self._clock() >= ends_s:
            logger.warning("generation goes on: nobody has renewed the lease of its pause")
            return self._go_on("its lease is over")
        if self._waiting is None or self._engine.has_work():
            return []
        call, self._waiting = self._waiting, None
        self._engine.is_paused = True
        self._answer(call.call_id)
        return self._add_held()

    def handle(self, message: Control) -> list[RequestOutput]:
        """Do what a message asks; return outputs of requests. Call it between two steps, with none in flight."""
        if not self.takes_orders:
            self._answer(message.call_id, "this engine is not for rollouts: it takes no orders")
            return []
        match message:
            case PauseGeneration():
                return self._pause(message)
            case ContinueGeneration():
                return self._continue(message)
            case AskState():
                self._answer(message.call_id, num_requests=len(self._engine.requests) + len(self._held))
                return []
            case FlushCache():
                self._flush(message)
                return []
            case UpdateDraftWeights():
                self._update_draft(message)
                return []
        return self._change(message)

    def _is_old(self, message: PauseGeneration | ContinueGeneration) -> bool:
        """Return whether a newer order was followed already; note the number of one that was not."""
        if 0.0 < message.asked_s <= self._engine.pause_asked_s:
            self._answer(message.call_id)
            return True
        self._engine.pause_asked_s = message.asked_s or self._engine.pause_asked_s
        return False

    def _pause(self, message: PauseGeneration) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        if self._is_old(message):
            return outputs
        self._engine.pause_ends_s = None if message.lease_s is None else self._clock() + message.lease_s
        if message.mode is PauseMode.WAIT and not self._engine.is_paused:
            refused = self._stop_waiting(f"a newer call, {message.call_id!r}, waits for the requests")
            self._waiting = message
            return refused + self.settle()
        self._engine.is_paused = True
        refused = self._stop_waiting("a newer call has paused")
        num_requests = len(self._engine.requests)
        if message.mode is PauseMode.ABORT:
            outputs = self._engine.end_all(FinishReason.ABORT)
        elif message.mode is PauseMode.RETRACT:
            self._engine.scheduler.preempt_all()
        self._answer(message.call_id, num_requests=num_requests)
        return refused + outputs

    def _continue(self, message: ContinueGeneration) -> list[RequestOutput]:
        if self._num_missing and self._weights is not None:
            named = "".join(f", {name!r} among them" for name in self._weights.missing[:1])
            self._answer(
                message.call_id,
                f"an update of the weights is half here: {self._num_missing} tensors are missing{named}",
            )
            return []
        if self._is_old(message):
            return []
        outputs = self._go_on("generation was continued")
        self._answer(message.call_id)
        return outputs

    def _go_on(self, reason: str) -> list[RequestOutput]:
        """Run steps again; return refusals of requests that were held back."""
        self._engine.is_paused, self._engine.pause_ends_s = False, None
        return self._stop_waiting(reason)

    def _stop_waiting(self, reason: str) -> list[RequestOutput]:
        """Answer the pause that waits, if any, and let the requests in that were held back for it."""
        if self._waiting is None:
            return []
        self._answer(self._waiting.call_id, f"the pause did not begin: {reason}")
        self._waiting = None
        return self._add_held()

    def _add_held(self) -> list[RequestOutput]:
        held, self._held = self._held, {}
        return [refusal for message in held.values() if (refusal := self._engine.add(message)) is not None]

    def _flush(self, message: FlushCache) -> None:
        if num_running := len(self._engine.scheduler.running):
            self._answer(message.call_id, f"{num_running} requests hold KV")
            return
        self._engine.scheduler.flush_cache()
        self._answer(message.call_id)

    def _update_draft(self, message: UpdateDraftWeights) -> None:
        if self._change_draft is None:
            self._answer(message.call_id, "no drafter runs in this verifier's process")
            return
        result = self._reporting(self._change_draft, message)  # other results are taken meanwhile
        self._results.append(result)

    def _change(self, message: WeightChange) -> list[RequestOutput]:
        """Begin a change; there is one at a time, but the end of a group breaks off what is received from it."""
        if self._weights is None:
            self._answer(message.call_id, "this engine's weights cannot change")
            return []
        outputs: list[RequestOutput] = []
        if isinstance(message, DestroyWeightsGroup) and self._changing is not None and _is_of_group(self._changing):
            outputs = self.finish_change(is_abandoned=True)
        if self._changing is not None:
            self._answer(message.call_id, ONE_AT_A_TIME)
            return outputs
        self._weights.begin(message)
        self._changing = message
        return outputs

    def finish_change(self, *, is_abandoned: bool = False) -> list[RequestOutput]:
        """Finish the change that has begun, however long that takes; return outputs of requests that it ends."""
        message, weights = self._changing, self._weights
        assert message is not None
        assert weights is not None
        self._changing, self._num_missing, outputs = None, 0, list[RequestOutput]()
        try:
            self._num_missing = self._reporting(lambda _: weights.finish(is_abandoned=is_abandoned), message)
        except BrokenWeightsError as error:
            self._engine.weights_error = str(error)
            outputs = self._engine.end_all(FinishReason.ERROR, str(error))
            self._answer(message.call_id, str(error))
        except ValueError as error:  # the weights are the old ones
            self._answer(message.call_id, str(error))
        else:
            if isinstance(message, UpdateWeights) and not self._num_missing:
                self._engine.take_version(message.weight_version, message.folder, weights.digest)
            self._answer(message.call_id, num_requests=len(self._engine.requests))
        return outputs

    def _reporting(self, change: Callable[[Message], Result], message: Message) -> Result:
        return change_beside(change, message, self._report, self._report_interval_s)

    def _answer(self, call_id: str, error: str | None = None, *, num_requests: int = 0) -> None:
        self._results.append(
            ControlResult(
                call_id=call_id,
                error=error,
                weight_version=self._engine.weight_version,
                weight_digest=self._engine.weights_digest,
                num_missing_tensors=self._num_missing,
                num_requests=num_requests,
                is_paused=self._engine.is_paused,
            )
        )


def _is_of_group(message: WeightChange) -> bool:
    """Return whether a change waits for a trainer."""
    return not isinstance(message, UpdateWeights) or message.folder is None


def change_beside(
    change: Callable[[Message], Result], message: Message, report: Callable[[], None], interval_s: float
) -> Result:
    """Make a change on a thread, and report every `interval_s` meanwhile: an engine that is silent is given up."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights") as thread:
        changed = thread.submit(change, message)
        while not wait([changed], interval_s).done:
            report()
    return changed.result()
