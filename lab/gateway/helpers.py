"""The benchmark's other processes: the client and the floors, told line by line."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Self

from outrider.lab.gateway.client import Ask, Found
from outrider.lab.gateway.floor import Sends

CLOSE_TIMEOUT_S = 10.0


class HelperError(RuntimeError):
    """A process of the benchmark's own has ended."""


class Helper:
    """A module that runs as a process until its input ends."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", f"outrider.lab.gateway.{module}"]
        environment = {**os.environ, "GRPC_VERBOSITY": "NONE"}
        self._name = module
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """Wait for a line. Raises `HelperError` if the process ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise HelperError(f"the benchmark's {self._name} has ended; what it said stands above")
        return line.rstrip("\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Client(Helper):
    """The process that asks."""

    def __init__(self) -> None:
        super().__init__("client")

    def send(self, ask: Ask, on_ended: Callable[[], None] = lambda: None) -> Found:
        """Send a load; `on_ended` is called when its last byte has come, before anything is read."""
        self.tell(ask.to_json())
        self.hear()
        on_ended()
        return Found.from_json(self.hear())


class Floor(Helper):
    """A process that answers every request with the same pieces."""

    def __init__(self, sends: Sends) -> None:
        super().__init__("floor")
        self.tell(sends.to_json())
        self.port = int(self.hear())
