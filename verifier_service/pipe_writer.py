"""Write to a pipe from a thread, so that a busy reader never blocks the writer's loop.

Without it, two processes that write to each other's full pipes would deadlock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection


class PipeWriter:
    """Queues frames for a pipe, in order; `on_failure` is called once, on the thread, if the other end is gone."""

    def __init__(self, pipe: Connection, on_failure: Callable[[OSError], None]) -> None:
        self._pipe = pipe
        self._on_failure = on_failure
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name="pipe-writer", daemon=True)
        self._thread.start()

    def write(self, frame: bytes) -> None:
        self._frames.put(frame)

    def close(self) -> None:
        """Let the thread end after the queued frames; they are lost if the reader is dead."""
        self._frames.put(None)

    def _write_all(self) -> None:
        try:
            while (frame := self._frames.get()) is not None:
                self._pipe.send_bytes(frame)
        except OSError as error:
            self._on_failure(error)
