"""Every engine that a verifier's shell may have at the other end of its pipe, each to be talked to alike."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from fakes.engine_bench import Pace, greedy_tokens
from fakes.hosted.vllm_outputs import output, scheduler_stats
from outrider.cluster.vllm_engine.load import VllmLoad
from outrider.cluster.vllm_engine.loop import VllmLoop
from outrider.drafter_service import embedded
from outrider.lab.gateway.played_engine import PlayedRunner, played_engine
from outrider.lab.gateway.played_spec import OnTime, PlayedSpec
from outrider.verifier_service.engine.loop import EngineLoop
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.request import GenerationRequest
from outrider.verifier_service.model.config import ModelConfig
from tiny.looping import NEVER_S, Loop, Shell

STEP_S = 0.002  # of an engine that plays


class EngineSide(Protocol):
    """An engine behind a shell, what it says to a prompt, and how it fails."""

    shell: Shell

    def expected(self, prompt: Sequence[int], length: int) -> tuple[int, ...]:
        """Return what it says after a prompt."""

    def running(self) -> set[str]:
        """Return the requests that it still works on."""

    def fail(self) -> None:
        """Let the engine fail in its next step."""


class OwnSide:
    """Our own engine over a fake runner, at one pace."""

    def __init__(self, pace: Pace) -> None:
        self.shell = type("PacedLoop", (Loop,), {"pace": pace})(NEVER_S)

    def expected(self, prompt: Sequence[int], length: int) -> tuple[int, ...]:
        return greedy_tokens(length, prompt)

    def running(self) -> set[str]:
        return set(self.shell.engine.requests)

    def fail(self) -> None:
        _break(self.shell.runner)


class PlayedSide:
    """The laboratory's engine without a model."""

    def __init__(self) -> None:
        self.shell = Shell()
        model = ModelConfig(path=str(embedded.target_path()), device="cpu")
        says = OnTime(token_ids=(11, 12, 13))
        verifier = VerifierSpec(model=model)
        spec = PlayedSpec(verifier=verifier, vocab_size=97, eos_token_ids=(0,), says=says, step_s=STEP_S)
        links, self._runner = RelayDraftClient(), PlayedRunner(spec)
        self._engine = engine = played_engine(spec, links, self._runner)
        self.shell.start(lambda pipe: EngineLoop(engine, links, pipe, clock=time.monotonic).run())

    def expected(self, prompt: Sequence[int], length: int) -> tuple[int, ...]:
        return ((11, 12, 13) * length)[:length]

    def running(self) -> set[str]:
        return set(self._engine.requests)

    def fail(self) -> None:
        _break(self._runner)


def _break(runner: Any) -> None:
    def execute(batch: Any, chosen: Any = None) -> Any:
        raise ArithmeticError("no device")

    runner.execute = execute


class PlayedVllm:
    """Answers each request with its prompt, over and over, a token at a time; `may_go` holds it up."""

    def __init__(self, load: VllmLoad) -> None:
        self.load = load
        self.is_dead = False
        self.running: set[str] = set()
        self.error: Exception | None = None
        self.may_go = True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        length = request.sampling.max_tokens
        self.running.add(request.request_id)
        try:
            for place in range(length):
                while not self.may_go:
                    await asyncio.sleep(STEP_S)
                if self.error is not None:
                    raise self.error
                self.load.record(scheduler_stats(1), None)
                token_id = request.prompt_token_ids[place % len(request.prompt_token_ids)]
                yield output([token_id], "length" if place + 1 == length else None)
                await asyncio.sleep(STEP_S)
        finally:
            self.running.discard(request.request_id)


class VllmSide:
    """vLLM, which is played, in our loop around it."""

    def __init__(self) -> None:
        self.shell, self.vllm = Shell(), PlayedVllm(VllmLoad())
        self.shell.start(lambda pipe: asyncio.run(self._run(pipe)))

    async def _run(self, pipe: Connection) -> None:
        await VllmLoop(self.vllm, self.vllm.load, pipe, is_drafted=False).run()

    def expected(self, prompt: Sequence[int], length: int) -> tuple[int, ...]:
        return (tuple(prompt) * length)[:length]

    def running(self) -> set[str]:
        return set(self.vllm.running)

    def fail(self) -> None:
        self.vllm.error, self.vllm.is_dead = RuntimeError("engine core died"), True


ENGINES: dict[str, Callable[[], EngineSide]] = {
    "own": lambda: OwnSide(Pace.AT_ONCE),
    "own, on a device": lambda: OwnSide(Pace.LATE),
    "own, running ahead": lambda: OwnSide(Pace.ASYNC),
    "played": PlayedSide,
    "vllm": VllmSide,
}


@contextlib.contextmanager
def engine_side(name: str) -> Iterator[EngineSide]:
    """Yield an engine, whose loop must end quietly with the pipe."""
    side = ENGINES[name]()
    yield side
    side.shell.end()
