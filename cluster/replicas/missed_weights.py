"""What a verifier missed that the fleet was told before it started, or while it did not answer."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

from outrider.cluster.router.fleet import FleetPause, FleetWeights
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import (
    ContinueGeneration,
    EngineLoad,
    PauseGeneration,
    PauseMode,
    UpdateWeights,
)

logger = logging.getLogger(__name__)
RETRY_S = 10.0  # after the weights could not be read


class MissedPause:
    """Pauses or goes on as the fleet does. Until then the router gives the verifier no request."""

    def __init__(self, control: ControlTable) -> None:
        self._control = control
        self._missed: asyncio.Queue[FleetPause] = asyncio.Queue()

    def follow(self, pause: FleetPause | None) -> None:
        """Note what a directive names."""
        if pause is not None and self._missed.empty():
            self._missed.put_nowait(pause)

    async def take_forever(self) -> None:
        """Follow the orders that were missed; the engine knows which of them is the newest.

        Raises `ConnectionError` with the engine's end.
        """
        while True:
            pause, call_id = await self._missed.get(), uuid.uuid4().hex
            order: PauseGeneration | ContinueGeneration = ContinueGeneration(call_id=call_id, asked_s=pause.asked_s)
            if pause.is_paused:
                order = PauseGeneration(
                    call_id=call_id, mode=PauseMode.KEEP, lease_s=pause.lease_left_s, asked_s=pause.asked_s
                )
            result = await self._control.call(order)
            if result.error is not None:
                logger.warning("the fleet's pause cannot be followed: %s", result.error)


class MissedWeights:
    """Takes the weights that the fleet took. Until then the router gives the verifier no request."""

    def __init__(
        self, control: ControlTable, load: Callable[[], EngineLoad | None], *, retry_s: float = RETRY_S
    ) -> None:
        """`load` is the engine's last report; None: it has not reported."""
        self._control, self._load, self._retry_s = control, load, retry_s
        self._missed: asyncio.Queue[FleetWeights] = asyncio.Queue()

    def follow(self, weights: FleetWeights | None) -> None:
        """Note what a directive names."""
        if weights is not None and self._missed.empty():
            self._missed.put_nowait(weights)

    async def take_forever(self) -> None:
        """Take what was missed, unless the verifier has got weights meanwhile or is being given some.

        Raises `ConnectionError` with the engine's end.
        """
        while True:
            weights, load = await self._missed.get(), self._load()
            if load is None or load.weights_taken_s > 0.0 or len(self._control) > 0:
                continue
            call = UpdateWeights(call_id=uuid.uuid4().hex, folder=weights.folder, weight_version=weights.version)
            result = await self._control.call(call)
            if result.error is not None:
                logger.warning("the fleet's weights, %r, cannot be taken: %s", weights.version, result.error)
                await asyncio.sleep(self._retry_s)
