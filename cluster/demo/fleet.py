"""The demo's hands inside the service: who decides about drafts, what was decided, which process drafts."""

from __future__ import annotations

from collections import Counter

from ray import serve

from outrider.cluster.config.service_config import APP_NAME, ServiceConfig
from outrider.cluster.router.fleet import FleetSnapshot, PolicyMode
from outrider.cluster.router.serve_scaling import drafter_deployment


class Fleet:
    """The running service behind its public ports."""

    def __init__(self, config: ServiceConfig) -> None:
        self._router = serve.get_deployment_handle("Router", APP_NAME)
        self._drafter = serve.get_deployment_handle(drafter_deployment(next(iter(config.pools))), APP_NAME)

    async def let_router_decide(self) -> None:
        """Leave it to the router who drafts."""
        await self._router.reconfigure.remote({"mode": PolicyMode.AUTO.value})

    async def pin_drafts(self) -> None:
        """Have everybody draft, whatever it costs, as an operator may."""
        await self._router.reconfigure.remote({"mode": PolicyMode.ALWAYS.value})

    async def decisions(self) -> Counter[str]:
        """Return how often the router has decided what, since its start, as "off: load"."""
        snapshot: FleetSnapshot = await self._router.snapshot.remote()
        return Counter({f"{item.decision}: {item.reason}": item.count for item in snapshot.decisions})

    async def drafter_pid(self) -> int:
        """Return the process in which a drafter of the first pool drafts."""
        pids: list[int] = await self._drafter.rank_pids.remote()
        return pids[0]
