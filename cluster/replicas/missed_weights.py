"""A verifier that started after the fleet took new weights takes them from their folder."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable

from outrider.cluster.router.fleet import FleetWeights
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import EngineLoad, UpdateWeights

logger = logging.getLogger(__name__)
RETRY_S = 10.0  # after the weights could not be read


class MissedWeights:
    """Follows the router's directives. Until then the router gives the verifier no request."""

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
