"""`outrider serve` in processes of its own, for studies that ask it as a client does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import httpx

from outrider.verifier_service.model.ranks import free_ports

START_TIMEOUT_S, TIMEOUT_S = 180.0, 600.0


@contextlib.contextmanager
def serving(model: str, options: Sequence[str], log: Path) -> Iterator[httpx.Client]:
    """Serve a model in processes of its own; yields a client."""
    http_port, grpc_port = free_ports(2)
    command = [str(Path(sys.executable).with_name("outrider")), "serve", model, *options]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", str(http_port), "--grpc-port", str(grpc_port)], stdout=file, stderr=file
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{http_port}", timeout=TIMEOUT_S) as http:
            wait_until_ready(http, process, log)
            yield http
    finally:
        process.terminate()
        process.wait()


def wait_until_ready(http: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the service; raises `click.ClickException` with its log if it does not come up."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if http.get("/ready").status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise click.ClickException(f"the service did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.5)
