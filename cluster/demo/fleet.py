"""The demo's hands inside the service: who decides about drafts, what was decided, which process drafts."""

from __future__ import annotations

import asyncio
from collections import Counter

from ray import serve

from outrider.cluster.common.reports import REPORT_INTERVAL_S
from outrider.cluster.config.service_config import APP_NAME, ServiceConfig
from outrider.cluster.router.fleet import FleetSnapshot, PolicyMode
from outrider.cluster.router.serve_scaling import drafter_deployment

HEARD_S = 2 * REPORT_INTERVAL_S  # until verifiers have reported and new requests are planned by the new mode


class Fleet:
    """The running service behind its public ports."""

    def __init__(self, config: ServiceConfig) -> None:
        self._router = serve.get_deployment_handle("Router", APP_NAME)
        self._drafter = serve.get_deployment_handle(drafter_deployment(next(iter(config.pools))), APP_NAME)

    async def let_router_decide(self) -> None:
        """Leave it to the router who drafts."""
        await self._set(PolicyMode.AUTO)

    async def pin_drafts(self) -> None:
        """Have everybody draft, whatever it costs, as an operator may."""
        await self._set(PolicyMode.ALWAYS)

    async def _set(self, mode: PolicyMode) -> None:
        await self._router.reconfigure.remote({"mode": mode.value})
        await asyncio.sleep(HEARD_S)

    async def decisions(self) -> Counter[str]:
        """Return how often the router has decided what, since its start, as "off: load"."""
        snapshot: FleetSnapshot = await self._router.snapshot.remote()
        return Counter({f"{item.decision}: {item.reason}": item.count for item in snapshot.decisions})

    async def drafter_pid(self) -> int:
        """Return the process in which a drafter of the first pool drafts."""
        pids: list[int] = await self._drafter.rank_pids.remote()
        return pids[0]
