"""An engine on a thread of its own, behind a pipe: what a replica does with an engine process, within one process."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.verifier_service.messages.engine import Control, ControlResult, EngineLoad, EngineUpdate, ToEngine
from outrider.verifier_service.messages.request import RequestOutput
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.ranks import widen
from outrider.verifier_service.pipe_writer import PipeWriter


class EngineEndedError(RuntimeError):
    """The engine has failed, or was closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEngine:
    """What callers need to know of a loaded engine."""

    max_model_len: int
    eos_token_ids: frozenset[int]
    weight_version: str


class EngineThread:
    """Runs an `OfflineEngine`. May be used by several threads.

    The engine is built on its thread, too: threads of the CPU's kernels and torch's modes are a thread's own.

        callers --- PipeWriter ---> pipe ---> engine thread: `EngineLoop`
        on_outputs, on_end <--- reader thread <--- pipe
    """

    def __init__(
        self,
        config: ServiceConfig,
        *,
        prices_drafts: bool,
        on_outputs: Callable[[Sequence[RequestOutput]], None],
        on_end: Callable[[EngineEndedError], None],
    ) -> None:
        """Load the model. Raises what `OfflineEngine` does. `on_outputs` and `on_end` are called on the reader thread.

        `on_end` is called once, and no output follows it.
        """
        self.load: EngineLoad | None = None  # the last report
        self._on_outputs, self._on_end = on_outputs, on_end
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # of the calls and the end
        self._calls: dict[str, Future[ControlResult]] = {}
        self._ended: EngineEndedError | None = None
        self._is_closing = False
        self._failure: Exception | None = None  # what the engine raised
        self._pipe, engines_end = map(widen, multiprocessing.Pipe())
        opened: Future[OpenedEngine] = Future()
        self._serving = threading.Thread(
            target=self._serve, args=(config, prices_drafts, engines_end, opened), name="engine", daemon=True
        )
        self._serving.start()
        try:
            self.opened = opened.result()
        except BaseException:
            self._pipe.close()
            raise
        self._writer = PipeWriter(self._pipe, lambda error: None)  # reading detects the same loss
        self._reading = threading.Thread(target=self._read, name="engine-reader", daemon=True)
        self._reading.start()

    def tell(self, message: ToEngine) -> None:
        """Send a message; one to an engine that has ended is lost, as `on_end` says."""
        self._writer.write(encode(message))

    def call(self, message: Control) -> Future[ControlResult]:
        """Send a control message, with a call id of its own.

        The future has an `EngineEndedError` if the engine ends, `ValueError` if the engine refuses.
        """
        call_id = f"call {next(self._numbers)}"
        answer: Future[ControlResult] = Future()
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._calls[call_id] = answer
        self.tell(replace(message, call_id=call_id))
        return answer

    def close(self) -> None:
        """End the engine and free what it holds; calls and requests that run end with an `EngineEndedError`."""
        self._is_closing = True
        if self._reading.is_alive():
            # half-closed: the engine reads end of file and ends, which the reader hears
            with socket.socket(fileno=os.dup(self._pipe.fileno())) as ours:
                ours.shutdown(socket.SHUT_WR)
        self._serving.join()
        self._reading.join()
        self._pipe.close()  # not by the reader: a failed engine's may end while this shuts the pipe down

    def _serve(
        self, config: ServiceConfig, prices_drafts: bool, pipe: Connection, opened: Future[OpenedEngine]
    ) -> None:
        try:
            with OfflineEngine(config, prices_drafts=prices_drafts) as engine:
                opened.set_result(
                    OpenedEngine(
                        max_model_len=engine.max_model_len,
                        eos_token_ids=engine.eos_token_ids,
                        weight_version=engine.engine.weight_version,
                    )
                )
                engine.serve(pipe)
        except Exception as error:
            self._failure = error
            if not opened.done():
                opened.set_exception(error)
        finally:
            pipe.close()

    def _read(self) -> None:
        try:
            while True:
                self._take(decode(self._pipe.recv_bytes(), (EngineUpdate,)))
        except (EOFError, OSError) as error:
            cause: Exception = self._failure or error
        except Exception as error:  # outputs are lost: a failed engine is better than a sample that never ends
            cause = error
        text = "the engine was closed" if self._is_closing else f"the engine has failed: {cause!r}"
        ended = EngineEndedError(text)
        ended.__cause__ = cause
        self._end(ended)

    def _take(self, update: EngineUpdate) -> None:
        self.load = update.load or self.load
        self._on_outputs([output.opened() for output in update.outputs])
        for result in update.results:
            with self._lock:
                answer = self._calls.pop(result.call_id)
            if result.error is None:
                answer.set_result(result)
            else:
                answer.set_exception(ValueError(result.error))

    def _end(self, error: EngineEndedError) -> None:
        with self._lock:
            self._ended = error
            calls, self._calls = self._calls, {}
        for answer in calls.values():
            answer.set_exception(error)
        self._on_end(error)
        self._writer.close()
