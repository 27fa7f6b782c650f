"""Run vLLM behind our own engine's pipe: requests in, tokens out, a load a few times a second.

The loop is asynchronous, as vLLM's engine: a task per request, and one for loads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from typing import Any, Protocol

from outrider.cluster.vllm_engine.answers import answer_of
from outrider.cluster.vllm_engine.load import VllmLoad
from outrider.verifier_service.messages.engine import (
    CONTROLS,
    BadRequest,
    Cancel,
    ControlResult,
    EngineUpdate,
    Published,
    RequestLoad,
    read_frame,
)
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.pipe_writer import PipeWriter

logger = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.2


class HostedEngine(Protocol):
    """The part of vLLM that the loop uses."""

    @property
    def is_dead(self) -> bool:
        """Whether the engine has failed."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        """Yield vLLM's outputs, each with the tokens since the last; closing the generator aborts the request.

        Raises `ValueError` for a refused request.
        """


class VllmLoop:
    """Pass messages between the pipe and vLLM, until either ends."""

    def __init__(self, engine: HostedEngine, load: VllmLoad, pipe: Connection, *, is_drafted: bool) -> None:
        self._engine = engine
        self._load = load
        self._pipe = pipe
        self._is_drafted = is_drafted
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()  # set when the shell or vLLM has ended
        self._writer = PipeWriter(pipe, self._on_write_error)
        self._running: dict[str, tuple[GenerationRequest, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Serve until the shell closes the pipe or vLLM fails; then close the pipe, so that the shell knows."""
        self._loop.add_reader(self._pipe.fileno(), self._read)
        loads = asyncio.create_task(self._tell_loads())
        try:
            await self._ended.wait()
        finally:
            self._loop.remove_reader(self._pipe.fileno())
            tasks = [loads, *(task for _, task in self._running.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._writer.close()

    def _on_write_error(self, error: OSError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._ended.set)

    def _read(self) -> None:
        try:
            while self._pipe.poll(0):
                self._dispatch(read_frame(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._ended.set()
        except Exception:  # a frame is lost: a failed engine is better than a silent stream
            logger.exception("a frame of the shell could not be handled")
            self._ended.set()

    def _dispatch(self, message: Any) -> None:
        match message:
            case BadRequest(request_id=request_id, error=error):
                self._publish(RequestOutput.failed(request_id, error))
            case GenerationRequest(request_id=request_id):
                task = asyncio.create_task(self._serve(message))
                self._running[request_id] = message, task
                task.add_done_callback(lambda _: self._running.pop(request_id))
            case Cancel(request_id=request_id) if request_id in self._running:
                self._running[request_id][1].cancel()
            case _ if isinstance(message, CONTROLS):
                self._refuse(message.call_id)
            case _:  # plans and links: the plug-in follows the router itself
                pass

    def _refuse(self, call_id: str) -> None:
        error = "vLLM's engine does not pause, flush or change weights through us: call vLLM's own endpoints"
        self._send(EngineUpdate(results=(ControlResult(call_id=call_id, error=error),)))

    async def _serve(self, request: GenerationRequest) -> None:
        """Publish one request's outputs; a refusal is the last one. If the engine fails, so does the loop."""
        try:
            async with contextlib.aclosing(self._engine.generate(request)) as outputs:
                async for output in outputs:
                    self._publish(answer_of(request, output, is_drafted=self._is_drafted))
        except ValueError as error:
            self._publish(RequestOutput.failed(request.request_id, str(error)))
        except Exception as error:
            if self._engine.is_dead:
                logger.exception("vLLM has died")
                self._ended.set()
                return
            logger.exception("request %s has failed in vLLM", request.request_id)
            self._publish(RequestOutput.failed(request.request_id, f"vLLM failed: {type(error).__name__}: {error}"))

    async def _tell_loads(self) -> None:
        """Publish the load, except while vLLM has requests but takes no step: then the shell fails the engine."""
        while not self._engine.is_dead:
            if not self._running or self._load.has_news:
                requests = [_load_of(request) for request, _ in self._running.values()]
                self._send(EngineUpdate(load=self._load.describe(requests)))
            await asyncio.sleep(LOAD_INTERVAL_S)
        self._ended.set()

    def _publish(self, output: RequestOutput) -> None:
        self._send(EngineUpdate(outputs=(Published.of(output),)))

    def _send(self, update: EngineUpdate) -> None:
        self._writer.write(encode(update))


def _load_of(request: GenerationRequest) -> RequestLoad:
    """Describe a request by what is known here: its id and options."""
    return RequestLoad(
        request_id=request.request_id,
        is_running=True,
        drafter_id=None,
        draft_length=0,
        num_speculative_tokens=request.sampling.num_speculative_tokens,
        priority=request.priority,
    )
