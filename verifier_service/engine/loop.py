"""Run a verifier engine in a process of its own: requests and drafts in, tokens out, over one pipe.

No server thread shares the process: none can starve the step loop. When no step can run, the loop sleeps on the pipe
until a message arrives or the next draft deadline passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

from outrider.verifier_service.engine.control import ChangeDraft, EngineControl, Weights
from outrider.verifier_service.engine.counters import circuits_of, counters_of
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.step_stats import RecentRates
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.beam_search import ends_by_text
from outrider.verifier_service.messages.engine import (
    CONTROLS,
    BadRequest,
    Cancel,
    Control,
    EndTake,
    EngineLoad,
    EngineUpdate,
    HandOver,
    PartsRead,
    PauseGeneration,
    PauseMode,
    PeerState,
    PeerWeights,
    Published,
    Relay,
    RequestLoad,
    SetPlans,
    TakeKV,
    TakenFrame,
    ToEngine,
    read_frame,
)
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import MAX_FRAME_BYTES, encode
from outrider.verifier_service.model.ranks import arrived
from outrider.verifier_service.sampling.grammar import GrammarQueue

LOAD_INTERVAL_S = 0.2
POLLING_INTERVAL_S = 0.005  # how often to poll grammars and new weights while nothing else can run
HANDOVER_INTERVAL_S = 0.001  # and how often tensors of KV that was announced


class EngineLoop:
    """Moves messages between the pipe and the engine, and runs its steps."""

    def __init__(
        self,
        engine: VerifierEngine,
        drafts: RelayDraftClient,
        pipe: Connection,
        *,
        clock: Callable[[], float],
        check_integrity: bool = False,
        weights: Weights | None = None,
        change_draft: ChangeDraft | None = None,
        takes_orders: bool = True,
    ) -> None:
        """`check_integrity`: check the engine's books after every step; an error ends the loop.

        Without `weights`, they cannot change. `change_draft`: changes those of the drafter in this process.
        `takes_orders`: a trainer is served.
        """
        self._engine = engine
        self._drafts = drafts
        self._pipe = pipe
        self._clock = clock
        self._checks_integrity = check_integrity
        self._control = EngineControl(
            *(engine, weights, change_draft),
            takes_orders=takes_orders,
            clock=clock,
            report=self._publish,
            report_interval_s=LOAD_INTERVAL_S,
        )
        self._failures: list[RequestOutput] = []
        self._unpublished: list[RequestOutput] = []  # outputs of steps
        self._unhandled: list[ToEngine | BadRequest] = []  # messages that were read while a step ran
        self._compiling = None if engine.grammars is None else GrammarQueue(engine.grammars)
        self._next_load_s = 0.0
        self._num_reported = 0  # running requests in the last load report
        self._rates = RecentRates()

    def run(self) -> None:
        """Step until the shell closes the pipe."""
        is_idle = True
        with contextlib.suppress(EOFError, ConnectionError):  # the shell is gone
            while True:
                if is_idle:
                    self._wait()
                else:
                    self._receive(patience_s=0.0)
                outputs = self._engine.step(self._meanwhile)
                is_idle = outputs is None
                self._unpublished += outputs or []
                self._unpublished += self._control.settle()
                self._finish_change()
                is_idle = not self._hand_over() and is_idle
                if self._engine.runs_async and not is_idle:
                    self._send_asks()  # the next step may wait for drafts; outputs are published while it runs
                else:
                    self._publish()
                    self._engine.pricing.learn()  # now, while drafters work
                if self._checks_integrity:
                    self._engine.check_integrity()

    def _meanwhile(self) -> None:
        """While a step runs, publish the outputs of the last one and read the pipe."""
        self._publish()
        self._unhandled += (read_frame(frame) for frame in arrived(self._pipe, 0.0))

    def _wait(self) -> None:
        """Sleep on the pipe, since nothing could run; with requests, that time is lost to waiting for drafts."""
        begin_s, has_work = self._clock(), self._engine.has_work()
        self._receive(self._patience_s())
        if has_work and not self._engine.is_paused:
            self._engine.stats.idle_s += self._clock() - begin_s

    def _patience_s(self) -> float:
        """Return how long to sleep on the pipe when nothing could run: not beyond the next load report."""
        idle_s = self._engine.idle_s()
        is_polling = self._compiling or self._control.is_changing
        longest_s = POLLING_INTERVAL_S if is_polling else LOAD_INTERVAL_S
        if self._engine.handovers.is_busy:
            longest_s = HANDOVER_INTERVAL_S
        return longest_s if idle_s is None else min(idle_s, longest_s)

    def _receive(self, patience_s: float) -> None:
        """Handle all messages that have arrived, waiting `patience_s` for the first one."""
        unhandled, self._unhandled = self._unhandled, []
        for message in unhandled:
            self._dispatch(message)
        for frame in arrived(self._pipe, 0.0 if unhandled else patience_s):
            self._dispatch(read_frame(frame))
        if self._compiling is not None:
            for message, error in self._compiling.take_ready():
                if error is None:
                    self._add(message)
                else:  # `engine.add` would compile again, delay the step, and fail again
                    self._failures.append(RequestOutput.failed(message.request_id, error))

    def _hand_over(self) -> bool:
        """Send KV to takers; queue the requests whose KV has come, and return whether there are any."""
        given, taken, failed = self._engine.handovers.pump()
        for frame in given:  # each by itself: it may be as large as a message may be
            self._send(EngineUpdate(given=(frame,)))
        self._unpublished += failed
        for message, kv in taken:
            if (refusal := self._engine.add(message, kv)) is not None:
                self._engine.handovers.drop(message.request_id)
                self._failures.append(refusal)
        return bool(taken)

    def _add(self, message: GenerationRequest) -> None:
        refusal: RequestOutput | None = None
        if message.kv_source is not None:
            refusal = self._engine.handovers.begin(message)
        elif not self._control.hold(message):
            refusal = self._engine.add(message)
        if refusal is not None:
            self._failures.append(refusal)

    def _dispatch(self, message: ToEngine | BadRequest) -> None:
        match message:
            case BadRequest():
                self._failures.append(RequestOutput.failed(message.request_id, message.error))
            case GenerationRequest():
                needs_texts = message.sampling.has_mask or ends_by_text(message.sampling)
                if not needs_texts or self._compiling is None:
                    self._add(message)
                else:
                    self._compiling.put(message)
            case Cancel(request_id=request_id):
                if self._compiling is not None:
                    self._compiling.drop(request_id)
                self._control.drop(request_id)
                self._engine.handovers.drop(request_id)
                self._engine.cancel(request_id)
            case SetPlans(plans=plans):
                self._engine.set_plans(plans)
            case Relay() | PeerState() | PeerWeights():
                self._drafts.feed(message)
            case TakeKV() | EndTake() | PartsRead() | TakenFrame():
                self._engine.handovers.handle(message)
            case HandOver(max_held=max_held):
                self._unpublished += self._engine.drain()
                self._unpublished += self._engine.hold(max_held)
            case _ if isinstance(message, CONTROLS):
                self._order(message)

    def _order(self, message: Control) -> None:
        """Do what a trainer asks, with no step in flight."""
        self._unpublished += self._engine.drain()
        self._publish()  # a change of weights takes long
        is_abort = isinstance(message, PauseGeneration) and message.mode is PauseMode.ABORT
        if is_abort and self._control.takes_orders:
            self._abort_compiling()
        self._unpublished += self._control.handle(message)

    def _finish_change(self) -> None:
        """Finish a change of the weights that is ready, with no step in flight."""
        if self._control.is_ready:
            self._unpublished += self._engine.drain()
            self._publish()  # a change of weights takes long
            self._unpublished += self._control.finish_change()

    def _abort_compiling(self) -> None:
        """End the requests whose grammars are being compiled: the engine does not know them yet."""
        for message in [] if self._compiling is None else self._compiling.take_all():
            self._failures.append(
                RequestOutput(
                    request_id=message.request_id,
                    token_ids=(),
                    finish_reason=FinishReason.ABORT,
                    weight_version=self._engine.weight_version,
                )
            )

    def _send_asks(self) -> None:
        if relays := self._drafts.take_outbox():
            self._send(EngineUpdate(relays=relays))

    def _publish(self) -> None:
        outputs = (*self._failures, *self._unpublished)
        self._failures, self._unpublished = [], []
        update = EngineUpdate(
            outputs=tuple(map(Published.of, outputs)),
            relays=self._drafts.take_outbox(),
            load=self._take_due_load(),
            results=self._control.take_results(),
            pulls=self._engine.handovers.take_calls(),
        )
        if update != EngineUpdate():
            self._send(update)

    def _send(self, update: EngineUpdate) -> None:
        for frame in update_frames(update):
            self._pipe.send_bytes(frame)

    def _take_due_load(self) -> EngineLoad | None:
        """Return a load report if one is due: every `LOAD_INTERVAL_S`, and at once when the running requests halve.

        Requests without drafts because of load can then draft again without delay.
        """
        now_s, num_running = self._clock(), len(self._engine.scheduler.running)
        if now_s < self._next_load_s and 2 * num_running >= self._num_reported:
            return None
        self._num_reported = num_running
        self._next_load_s = now_s + LOAD_INTERVAL_S
        drafting = self._engine.drafting
        self._rates.sample(
            self._engine.stats, now_s, num_asks=drafting.num_asks, num_asked_tokens=drafting.num_asked_tokens
        )
        load = engine_load(self._engine, self._rates, now_s, self._drafts)
        num_coming = self._control.num_held + self._engine.handovers.num_coming
        return replace(load, num_waiting=load.num_waiting + num_coming)


def update_frames(update: EngineUpdate, max_bytes: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """Encode an update, split in halves until no frame exceeds `max_bytes`.

    Frames are largest when a drafter joins: it is sent the whole prefix of every request.
    """
    frame = encode(update)
    outputs, relays = update.outputs, update.relays
    if len(frame) <= max_bytes or len(outputs) + len(relays) < 2:
        yield frame
        return
    num_outputs, num_relays = (len(outputs) + 1) // 2, len(relays) // 2
    first = EngineUpdate(outputs=outputs[:num_outputs], relays=relays[:num_relays])
    yield from update_frames(first, max_bytes)
    rest = replace(update, outputs=outputs[num_outputs:], relays=relays[num_relays:])
    yield from update_frames(rest, max_bytes)


def engine_load(
    engine: VerifierEngine, rates: RecentRates, now_s: float, drafts: RelayDraftClient | None = None
) -> EngineLoad:
    """Return the engine's load report; `drafts` is its client for drafters behind links, if it has one."""
    scheduler, drafting = engine.scheduler, engine.drafting
    running = [request for request in scheduler.running if not request.is_background]  # it is no load
    waiting = scheduler.waiting
    return EngineLoad(
        num_running=len(running),
        num_waiting=scheduler.num_waiting,
        num_decoding=sum(request.is_decoding for request in running),
        kv_usage=scheduler.kv_usage,
        tokens_per_s=rates.tokens_per_s,
        mean_step_s=rates.mean_step_s,
        price=engine.pricing.price,
        knee=engine.pricing.knee,
        draft_length_mean=rates.draft_length_mean,
        verify_idle_share=rates.idle_share,
        counters=counters_of(
            engine.stats,
            drafting,
            engine.pricing,
            drafts or RelayDraftClient(),
            scheduler,
            engine.handovers.counters(),
        ),
        requests=(
            *(RequestLoad.of(request, is_running=True) for request in running),
            *(RequestLoad.of(request, is_running=False) for request in waiting),
        ),
        drafters=drafting.drafters(now_s),
        circuits=circuits_of(drafting, now_s),
        weight_version=engine.weight_version,
        weights_taken_s=engine.weights_taken_s,
        weights_digest=engine.weights_digest,
        weights_folder=engine.weights_folder,
        weights_error=engine.weights_error,
        is_paused=engine.is_paused,
        pause_asked_s=engine.pause_asked_s,
        pause_left_s=None if engine.pause_ends_s is None else max(0.0, engine.pause_ends_s - now_s),
    )
