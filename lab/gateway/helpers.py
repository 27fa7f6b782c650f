"""The benchmark's other processes: the client and the floors, told line by line."""

from __future__ import annotations

import sys
from collections.abc import Callable

from outrider.lab.gateway.client import Ask, Found
from outrider.lab.gateway.floor import Sends
from outrider.lab.line_process import LineProcess


class Helper(LineProcess):
    """A module that runs as a process until its input ends."""

    def __init__(self, module: str) -> None:
        command = [sys.executable, "-m", f"outrider.lab.gateway.{module}"]
        super().__init__(module, command, {"GRPC_VERBOSITY": "NONE"})


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
