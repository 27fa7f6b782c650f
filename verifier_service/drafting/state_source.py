"""The coordinator's interface to the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from outrider.verifier_service.messages.draft import States
from outrider.verifier_service.messages.request import Request


class StateSource(Protocol):
    """Tapped hidden states of running requests; `StatePool` implements it."""

    def messages(self, request: Request, start: int, stop: int) -> Iterable[States]:
        """Return messages with the states of a running request's positions [start, stop)."""
