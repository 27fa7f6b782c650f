"""`outrider serve` in processes of its own, for studies that ask it as a client does and compare what it says."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from outrider.cluster.config.known_models import path_of
from outrider.lab.same_tokens import Pair, Reference, Seeded, plain_decoding
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.ranks import free_ports

START_TIMEOUT_S, TIMEOUT_S = 180.0, 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """An answer in token ids, and the prompt as the service read it."""

    prompt: Sequence[int]
    token_ids: Sequence[int]

    def beside(self, expected: Told, what: str, asked: Mapping[str, Any]) -> Pair:
        """Return both answers to one request; `asked`: its body, by which it was drawn."""
        seeded = Seeded(seed=asked["seed"], temperature=asked["temperature"]) if asked["temperature"] else None
        return Pair(what=what, prompt=expected.prompt, expected=expected.token_ids, given=self.token_ids, seeded=seeded)


def told(answer: Mapping[str, Any]) -> Told:
    """Read a whole answer of the OpenAI endpoints to a request with `return_token_ids`."""
    choice = answer["choices"][0]
    prompt = answer["prompt_token_ids"] if "prompt_token_ids" in answer else choice["prompt_token_ids"]
    return Told(prompt=prompt, token_ids=choice["token_ids"])


def in_float32(model: str) -> Callable[[], Reference]:
    """Return what loads the plain decoding of a model that was served in float32."""
    return plain_decoding(ModelConfig(path=path_of(model), dtype="float32"))


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
