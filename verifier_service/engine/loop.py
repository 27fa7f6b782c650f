"""Run a verifier engine in a process of its own: requests and drafts in, tokens out, over one pipe.

The process does nothing else, so that no server thread can starve the step loop. When no step can run it sleeps on
the pipe until something arrives or the next draft deadline passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

from outrider.verifier_service.engine.counters import circuits_of, counters_of
from outrider.verifier_service.engine.engine import VerifierEngine, failure
from outrider.verifier_service.engine.step_stats import RecentRates
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.engine import (
    BadRequest,
    Cancel,
    EngineLoad,
    EngineUpdate,
    PeerState,
    Relay,
    RequestLoad,
    SetPlans,
    ToEngine,
    read_frame,
)
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import MAX_FRAME_BYTES, encode
from outrider.verifier_service.model.ranks import arrived
from outrider.verifier_service.sampling.grammar import GrammarQueue

LOAD_INTERVAL_S = 0.2
COMPILING_INTERVAL_S = 0.005  # how often to look for a grammar that is ready, where nothing can run


class EngineLoop:
    """Shovel messages between the pipe and the engine, step after step."""

    def __init__(
        self,
        engine: VerifierEngine,
        drafts: RelayDraftClient,
        pipe: Connection,
        *,
        clock: Callable[[], float],
        check_integrity: bool = False,
    ) -> None:
        """`check_integrity` is called after every step where asked for; its error ends the loop."""
        self._engine = engine
        self._drafts = drafts
        self._pipe = pipe
        self._clock = clock
        self._checks_integrity = check_integrity
        self._failures: list[RequestOutput] = []
        self._untold: list[RequestOutput] = []  # of steps
        self._read: list[ToEngine | BadRequest] = []  # while a step ran, to be taken in after it
        self._compiling = None if engine.grammars is None else GrammarQueue(engine.grammars)
        self._next_load_s = 0.0
        self._num_reported = 0  # requests that ran in the last load told
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
                self._untold += outputs or []
                if self._engine.runs_apart and not is_idle:
                    self._tell_drafters()  # they are waited for; the rest is told while the next step runs
                else:
                    self._publish()
                    self._engine.pricing.learn()  # tokens and asks are on their way
                if self._checks_integrity:
                    self._engine.check_integrity()

    def _meanwhile(self) -> None:
        """Do what can be done while a step runs: tell what the one before brought, and read what has arrived."""
        self._publish()
        self._read += (read_frame(frame) for frame in arrived(self._pipe, 0.0))

    def _wait(self) -> None:
        """Sleep on the pipe: nothing could run. With requests at hand that is time lost to drafts on their way."""
        begin_s, has_work = self._clock(), self._engine.has_work()
        self._receive(self._patience_s())
        if has_work:
            self._engine.stats.idle_s += self._clock() - begin_s

    def _patience_s(self) -> float:
        """Return how long to sleep on the pipe when nothing could run; load reports go on even then."""
        idle_s = self._engine.idle_s()
        longest_s = COMPILING_INTERVAL_S if self._compiling else LOAD_INTERVAL_S
        return longest_s if idle_s is None else min(idle_s, longest_s)

    def _receive(self, patience_s: float) -> None:
        """Take in all that has arrived, waiting `patience_s` for the first of it."""
        read, self._read = self._read, []
        for message in read:
            self._dispatch(message)
        for frame in arrived(self._pipe, 0.0 if read else patience_s):
            self._dispatch(read_frame(frame))
        if self._compiling is not None:
            for message, error in self._compiling.take_ready():
                if error is None:
                    self._add(message)
                else:  # to compile it here again would hold up every step, to fail again
                    self._failures.append(failure(message.request_id, error))

    def _add(self, message: GenerationRequest) -> None:
        if (refusal := self._engine.add(message)) is not None:
            self._failures.append(refusal)

    def _dispatch(self, message: ToEngine | BadRequest) -> None:
        match message:
            case BadRequest():
                self._failures.append(failure(message.request_id, message.error))
            case GenerationRequest():
                if message.sampling.structured is None or self._compiling is None:
                    self._add(message)
                else:
                    self._compiling.put(message)
            case Cancel(request_id=request_id):
                if self._compiling is not None:
                    self._compiling.drop(request_id)
                self._engine.cancel(request_id)
            case SetPlans(plans=plans):
                self._engine.set_plans(plans)
            case Relay() | PeerState():
                self._drafts.feed(message)

    def _tell_drafters(self) -> None:
        if relays := self._drafts.take_outbox():
            self._send(EngineUpdate(relays=relays))

    def _publish(self) -> None:
        outputs = (*self._failures, *self._untold)
        self._failures, self._untold = [], []
        update = EngineUpdate(outputs=outputs, relays=self._drafts.take_outbox(), load=self._due_load())
        if update != EngineUpdate():
            self._send(update)

    def _send(self, update: EngineUpdate) -> None:
        for frame in update_frames(update):
            self._pipe.send_bytes(frame)

    def _due_load(self) -> EngineLoad | None:
        """Return the load now and then, and at once where it has halved: what it kept from drafting may draft again."""
        now_s, num_running = self._clock(), len(self._engine.scheduler.running)
        if now_s < self._next_load_s and 2 * num_running >= self._num_reported:
            return None
        self._num_reported = num_running
        self._next_load_s = now_s + LOAD_INTERVAL_S
        drafting = self._engine.drafting
        self._rates.sample(
            self._engine.stats, now_s, num_asks=drafting.num_asks, num_asked_tokens=drafting.num_asked_tokens
        )
        return engine_load(self._engine, self._rates, now_s, self._drafts)


def update_frames(update: EngineUpdate, max_bytes: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """Encode an update, halved until each frame is one that its reader takes.

    A drafter that joins is told the whole prefix of every request at once, however long they are.
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
    """Describe the engine's state for the router; `drafts` is its way to drafters behind links, where it has one."""
    scheduler, drafting = engine.scheduler, engine.drafting
    running, waiting = scheduler.running, scheduler.waiting
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
        counters=replace(
            counters_of(engine.stats, drafting, engine.pricing, drafts or RelayDraftClient()),
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queried_tokens=scheduler.num_prefix_queried_tokens,
            num_prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
        ),
        requests=(
            *(RequestLoad.of(request, is_running=True) for request in running),
            *(RequestLoad.of(request, is_running=False) for request in waiting),
        ),
        drafters=drafting.drafters(now_s),
        circuits=circuits_of(drafting, now_s),
    )
