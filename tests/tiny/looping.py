"""A verifier engine's loop on a thread of its own, and what it says."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from fakes.engine_bench import Pace, make_runner, tokens_of
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.control import Weights
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.loop import EngineLoop
from outrider.verifier_service.engine.pipelined import PipelinedEngine
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.draft import Close, Commit, Commits, Draft, Open
from outrider.verifier_service.messages.engine import (
    FROM_ENGINE,
    ControlResult,
    EngineLoad,
    EngineUpdate,
    Relay,
    UpdateDraftWeights,
)
from outrider.verifier_service.messages.request import FinishReason, RequestOutput
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.sampling.grammar import GrammarCompiler
from outrider.verifier_service.sampling.verification import begin
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from support import parts
from tiny.loop_thread import PATIENCE_S, LoopThread

NEVER_S = 1000.0  # a draft's deadline that no test waits for


def wait_for_drafts(num_tokens: int) -> dict[str, Any]:
    return {"draft_length": num_tokens, "drafter_id": "d"}


class LateEngine(PipelinedEngine):
    """An engine whose logits come once all is done that is done meanwhile and, where there is a gate, it is opened."""

    gate: threading.Semaphore | None = None

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> list[RequestOutput] | None:
        def act() -> None:
            assert self._runner.is_running
            meanwhile()
            if self.gate is not None:
                assert self.gate.acquire(timeout=PATIENCE_S)
            self._runner.arrive(num_left=int(self._next is not None))

        return super().step(act)

    def drain(self) -> list[RequestOutput]:
        if self._next is not None:
            self._runner.arrive()
        return super().drain()


class Shell(LoopThread):
    """The shell's end of the pipe to a verifier's engine, and all that came through it."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[RequestOutput] = []
        self.relays: list[Relay] = []
        self.loads: list[EngineLoad] = []
        self.results: list[ControlResult] = []

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.pipe.send_bytes(message if isinstance(message, bytes) else encode(message))

    def take(self, frame: bytes) -> None:
        update = decode(frame, FROM_ENGINE)
        assert isinstance(update, EngineUpdate)
        self.outputs += [output.opened() for output in update.outputs]
        self.relays += update.relays
        self.loads += [update.load] if update.load is not None else []
        self.results += update.results

    def finished(self) -> set[str]:
        return set(self.ends)

    @property
    def ends(self) -> dict[str, FinishReason]:
        """Return why requests have ended."""
        return {output.request_id: output.finish_reason for output in self.outputs if output.finish_reason is not None}

    def tokens(self, request_id: str) -> tuple[int, ...]:
        return tokens_of([output for output in self.outputs if output.request_id == request_id])


class Loop(Shell):
    """The same to our own engine's loop."""

    pace = Pace.AT_ONCE

    def __init__(
        self,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        make_pricing: Callable[[RelayDraftClient], DraftPricing] = lambda _: DraftPricing(),
        weights: Weights | None = None,
        change_draft: Callable[[UpdateDraftWeights], ControlResult] | None = None,
        takes_orders: bool = True,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        super().__init__()
        self.clock = clock
        self._weights, self._change_draft, self._takes_orders = weights, change_draft, takes_orders
        self.runner = make_runner(is_late=self.pace is not Pace.AT_ONCE, max_model_len=512, num_blocks=256)
        self.drafts = RelayDraftClient()
        limits = {"max_model_len": self.runner.max_model_len, "vocab_size": self.runner.vocab_size}
        deadlines = dict.fromkeys(("first_deadline_s", "min_deadline_s", "max_deadline_s"), deadline_s)
        speculation = CoordinatorConfig(**limits, **deadlines)
        self.engine = (VerifierEngine if self.pace is Pace.AT_ONCE else LateEngine)(
            self.runner,
            Scheduler(SchedulerConfig(**limits), BlockPool(self.runner.num_blocks, self.runner.block_size)),
            DraftCoordinator(self.drafts, speculation),
            clock=time.monotonic,
            generator=torch.Generator().manual_seed(0),
            grammars=grammars,
            pricing=make_pricing(self.drafts),
            verify=begin if self.pace is Pace.AT_ONCE else self.runner.verify,
        )
        self.engine.launches_early = self.pace is Pace.ASYNC
        self.start(self._run_loop)

    def _run_loop(self, pipe: Connection) -> None:
        EngineLoop(
            *(self.engine, self.drafts, pipe),
            clock=self.clock,
            check_integrity=True,
            weights=self._weights,
            change_draft=self._change_draft,
            takes_orders=self._takes_orders,
        ).run()

    def heard_by_drafter(self) -> list[Any]:
        return [*parts.singly(decode(relay.payload, (Open, Commit, Commits, Close)) for relay in self.relays)]

    def asks(self) -> list[Commit]:
        return [message for message in self.heard_by_drafter() if isinstance(message, Commit)]


@contextlib.contextmanager
def looping(deadline_s: float = NEVER_S, **options: Any) -> Iterator[Loop]:
    loop = Loop(deadline_s, **options)
    try:
        yield loop
    finally:
        loop.end()


def draft_for(ask: Commit, token_ids: tuple[int, ...]) -> Relay:
    draft = Draft(
        request_id=ask.request_id,
        round_id=ask.round_id,
        position=ask.position + len(ask.token_ids),
        token_ids=token_ids,
    )
    return Relay(peer="d", payload=encode(draft))
