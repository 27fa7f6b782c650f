"""Receive the start phases of this machine's processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from outrider.verifier_service.start_phases import MAX_PHASE_BYTES, PHASES_VARIABLE

POLL_S = 0.2


@contextlib.contextmanager
def phases_heard(on_phase: Callable[[str], None]) -> Iterator[None]:
    """Name a socket in the environment, which child processes inherit; pass on the phases that they send there.

    `on_phase` is called on a separate thread.
    """
    folder = Path(tempfile.mkdtemp(prefix="outrider-"))  # mode 0700: only this user's processes connect
    ended = threading.Event()
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        listener.bind(str(folder / "phases"))
        listener.settimeout(POLL_S)

        def listen() -> None:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    on_phase(listener.recv(MAX_PHASE_BYTES).decode(errors="replace"))

        thread = threading.Thread(target=listen, name="phases", daemon=True)
        thread.start()
        undo.callback(thread.join)
        undo.callback(ended.set)
        os.environ[PHASES_VARIABLE] = str(folder / "phases")
        undo.callback(os.environ.pop, PHASES_VARIABLE, None)
        yield
