"""The gateway's HTTP application on a port of 127.0.0.1, served by uvicorn on a thread: for clients that want a URL."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from outrider.verifier_service.model.ranks import free_port

START_TIMEOUT_S = 20.0


@contextlib.contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """Serve an application; yields its URL."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline_s, f"no server within {START_TIMEOUT_S} s"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(START_TIMEOUT_S)
