"""An engine's loop on a thread of its own, and the shell's end of its pipe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

PATIENCE_S = 20.0  # of the tests: never reached unless something is wrong


class LoopThread:
    """The shell's end; subclasses build the loop, and take what it says."""

    def __init__(self) -> None:
        self.pipe, self._far = Pipe()
        self.error: BaseException | None = None

    def start(self, run: Callable[[Connection], None]) -> None:
        """Run a loop at the other end of the pipe."""
        self.thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self.thread.start()

    def _run(self, run: Callable[[Connection], None]) -> None:
        try:
            run(self._far)
        except BaseException as error:
            self.error = error
        finally:
            self._far.close()

    def take(self, frame: bytes) -> None:
        """Note what the loop says."""
        raise NotImplementedError

    def hear_until(self, condition: Callable[[], object]) -> None:
        """Take frames until `condition()` holds."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.pipe.poll(max(0.0, deadline_s - time.monotonic())), "the loop says nothing more"
            assert time.monotonic() < deadline_s, "what was waited for does not come"
            self.take(self.pipe.recv_bytes())

    def end(self) -> None:
        """Close the pipe; the loop must then end by itself, quietly."""
        self.pipe.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        assert self.error is None, repr(self.error)
