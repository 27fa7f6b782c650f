"""Where drafters that read the target's hidden states get them from."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from outrider.verifier_service.messages.draft import States
from outrider.verifier_service.messages.request import Request


class StateSource(Protocol):
    """Where the target's tapped states are; `StatePool` fits."""

    def messages(self, request: Request, start: int, stop: int) -> Iterable[States]:
        """Say the states of a running request's positions [start, stop)."""
