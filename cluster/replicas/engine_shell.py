"""The asyncio side of an engine's pipe: sends frames without blocking, delivers frames and the engine's failure."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.pipe_writer import PipeWriter

logger = logging.getLogger(__name__)


class EngineShell:
    """Exchange frames with an engine process, from an event loop."""

    def __init__(
        self,
        pipe: Connection,
        message_types: Sequence[type],
        *,
        on_message: Callable[[Any], None],
        on_failure: Callable[[str], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._pipe = pipe
        self._message_types = message_types
        self._on_message = on_message
        self._on_failure = on_failure
        self._writer = PipeWriter(pipe, self._on_write_error)
        self.failure: str | None = None  # why the engine has failed

    def start(self) -> None:
        """Deliver messages from now on."""
        self._loop.add_reader(self._pipe.fileno(), self._read)
        # uvloop, on which Serve runs replicas, makes the pipe non-blocking: under load, a frame larger than the free
        # buffer would look like the engine's end
        os.set_blocking(self._pipe.fileno(), True)

    def send(self, message: Any) -> None:
        """Send a message, or the bytes of an encoded one; raises `ConnectionError` once the engine is gone."""
        if self.failure is not None:
            raise ConnectionError(self.failure)
        self._writer.write(message if isinstance(message, bytes) else encode(message))

    def close(self) -> None:
        """Close the pipe: the engine reads end of file and stops."""
        self.fail("closed by its replica")

    def _read(self) -> None:
        try:
            while self.failure is None and self._pipe.poll(0):
                self._on_message(decode(self._pipe.recv_bytes(), self._message_types))
        except EOFError:
            self.fail("engine process is gone: end of file")
        except OSError as error:
            self.fail(f"engine process is gone: {error}")
        except Exception as error:  # frames are lost: a failed engine is better than a silent stream
            logger.exception("a frame of the engine could not be handled")
            self.fail(f"a frame of the engine could not be handled: {error}")

    def _on_write_error(self, error: OSError) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.fail, f"engine process is gone: {error}")

    def fail(self, reason: str) -> None:
        """Close the pipe and call `on_failure`, once."""
        if self.failure is not None:
            return
        self.failure = reason
        self._loop.remove_reader(self._pipe.fileno())
        self._writer.close()
        self._pipe.close()
        logger.warning("no engine any more: %s", reason)
        self._on_failure(reason)
