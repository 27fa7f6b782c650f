"""A drafting engine on a thread of its servicer's process."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.payloads import handle_payload
from outrider.drafter_service.service.service import EngineDeadError
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.tensor_route import TensorRoute
from outrider.verifier_service.messages.wire import encode

logger = logging.getLogger(__name__)


class InProcessPort:
    """An `EnginePort` that runs the engine on a thread of this process."""

    def __init__(self, engine: DraftEngine, *, idle_s: float = 1.0) -> None:
        self._engine = engine
        self._idle_s = idle_s  # an engine without work still steps this often, for its sessions to expire
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deliver: dict[str, Callable[[bytes], None]] = {}
        self._load = engine.load()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)
        self._thread.start()

    def submit(self, peer: str, payload: bytes) -> None:
        self._inbox.put(lambda: self._handle(peer, payload))

    def peer_gone(self, peer: str) -> None:
        self._inbox.put(lambda: self._engine.forget_peer(peer))

    def subscribe(self, peer: str, deliver: Callable[[bytes], None]) -> None:
        self._deliver[peer] = deliver

    def unsubscribe(self, peer: str) -> None:
        self._deliver.pop(peer, None)

    def open_tensors(self, peer: str, route: TensorRoute) -> None:
        raise NotImplementedError("an engine on a thread of its servicer's process has no channels: it gets bytes")

    def load(self) -> DrafterLoad:
        if not self._thread.is_alive():
            raise EngineDeadError(f"the drafting engine has ended: {self._error or 'stopped'}")
        return self._load

    def stop(self) -> None:
        """End the engine's thread and wait for it."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._take_in():
                for peer, message in self._engine.step():
                    self._send(peer, encode(message))
                self._load = self._engine.load()
        except Exception as error:
            logger.exception("the drafting engine failed")
            self._error = error

    def _take_in(self) -> bool:
        """Run what is queued, sleeping only while the engine has nothing to do; False when it shall stop."""
        deadline_s = time.monotonic() + (0.0 if self._engine.has_work() else self._idle_s)
        while True:
            try:
                job = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                return True
            if job is None:
                return False
            job()
            deadline_s = 0.0

    def _handle(self, peer: str, payload: bytes) -> None:
        for answer in handle_payload(self._engine, peer, payload):
            self._send(peer, answer)

    def _send(self, peer: str, payload: bytes) -> None:
        deliver = self._deliver.get(peer)
        if deliver is not None:
            deliver(payload)
