"""A `DraftClient` whose only drafter runs in the caller's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.service.own_weights import DrafterControl
from outrider.drafter_service.service.plugin_drafter import PluginFailedError
from outrider.verifier_service.engine.unread import UnreadDrafts
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, DrafterEvent, VerifierMessage
from outrider.verifier_service.messages.engine import ControlResult, UpdateDraftWeights

logger = logging.getLogger(__name__)
_PEER = "local"


class LocalDraftClient:
    """`poll` makes all asked drafts, so that no step misses one; `send` has the device begin where it can.

    If a drafter of ours raises, the process ends. If a plug-in raises, it stays down, and decoding goes on.
    """

    def __init__(
        self, engine: DraftEngine, control: DrafterControl | None = None, *, begins_early: bool = True
    ) -> None:
        """Without `control`, the drafter's weights cannot change.

        `begins_early`: `send` has the device begin. Where the host computes, the wait would be part of the verifier's
        own time, and the price of drafts would miss it.
        """
        self._engine, self._control = engine, control or DrafterControl(engine)
        self._inbox: list[VerifierMessage] = []
        self._is_up, self._begins_early = True, begins_early
        self._events = [
            DrafterEvent(
                drafter_id=LOCAL_DRAFTER_ID,
                vocab_size=engine.vocab_size,
                needs=engine.needs,
                weight_version=engine.weight_version,
            )
        ]

    def change_weights(self, message: UpdateDraftWeights) -> ControlResult:
        """Give the drafter new weights of its own, between two steps."""
        if self._engine.launched is not None:
            self._step()
        result = self._control.handle(message)
        if result.error is None:
            self._events.append(DrafterEvent(drafter_id=LOCAL_DRAFTER_ID, weight_version=result.weight_version))
        return result

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        if drafter_id == LOCAL_DRAFTER_ID and self._is_up:
            self._inbox.extend(messages)
            if self._begins_early:
                self._try(self._launch)

    def poll(self) -> list[DrafterEvent]:
        self._try(self._draft)
        events, self._events = self._events, []
        return events

    def unread(self) -> UnreadDrafts | None:
        if self._engine.launched is None or self._engine.has_messages or self._events or not self._is_up:
            return None
        sessions, chains = self._engine.launched
        rounds = [session.round.round_id for session in sessions if session.round is not None]
        return UnreadDrafts([session.key.request_id for session in sessions], rounds, chains.unread())

    def _try(self, act: Callable[[], None]) -> None:
        if self._is_up:
            try:
                act()
            except PluginFailedError:
                logger.exception("the drafter in this verifier has failed: nothing is drafted here any more")
                self._is_up = False
                self._events.append(DrafterEvent(drafter_id=LOCAL_DRAFTER_ID, is_up=False))

    def _launch(self) -> None:
        """Begin to draft, where the device does so by itself while the verifier goes on; later messages wait."""
        if self._engine.launched is None:
            self._handle()
            self._engine.launch()

    def _draft(self) -> None:
        if self._engine.launched is not None:
            self._step()
        self._handle()
        while self._engine.has_work():
            self._step()

    def _handle(self) -> None:
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self._engine.handle(_PEER, message)

    def _step(self) -> None:
        found = self._engine.step()
        self._events.extend(DrafterEvent(drafter_id=LOCAL_DRAFTER_ID, message=message) for _, message in found)
