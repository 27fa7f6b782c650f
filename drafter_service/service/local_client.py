"""A `DraftClient` whose only drafter runs in the caller's own process and thread."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, DrafterEvent, VerifierMessage

_PEER = "local"


class LocalDraftClient:
    """Drafts are made inside `poll`, all that were asked for, so a step never finds one missing."""

    def __init__(self, engine: DraftEngine) -> None:
        self._engine = engine
        self._inbox: list[VerifierMessage] = []
        self._events = [DrafterEvent(drafter_id=LOCAL_DRAFTER_ID, vocab_size=engine.vocab_size, needs=engine.needs)]

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        if drafter_id == LOCAL_DRAFTER_ID:
            self._inbox.extend(messages)

    def poll(self) -> list[DrafterEvent]:
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self._engine.handle(_PEER, message)
        while self._engine.has_work():
            self._events.extend(
                DrafterEvent(drafter_id=LOCAL_DRAFTER_ID, message=message) for _, message in self._engine.step()
            )
        events, self._events = self._events, []
        return events
