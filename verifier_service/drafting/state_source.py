"""The coordinator's interface to the target's hidden states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from outrider.verifier_service.drafting.drafter_record import DraftSession
from outrider.verifier_service.messages.draft import DraftNeeds, States
from outrider.verifier_service.messages.request import Request


class StateSource(Protocol):
    """Tapped hidden states of running requests; `StatePool` implements it."""

    def messages(self, request: Request, start: int, stop: int) -> Iterable[States]:
        """Return messages with the states of a running request's positions [start, stop)."""


def unsent_states(
    source: StateSource | None, needs: DraftNeeds, request: Request, session: DraftSession
) -> Iterable[States]:
    """Return the hidden states that a drafter needs and lacks, as sent from now on; the last token has none yet."""
    if not needs.taps or source is None:
        return ()
    stop = request.num_computed_tokens
    start = max(0, stop - 1) if needs.last_state_only else session.num_sent_states
    session.num_sent_states = stop
    return source.messages(request, start, stop)
