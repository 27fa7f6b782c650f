"""The demo's hands inside the service: who decides about drafts, what was decided, which process drafts."""

from __future__ import annotations

import asyncio
import time

from ray import serve

from outrider.cluster.common.reports import REPORT_INTERVAL_S
from outrider.cluster.config.service_config import APP_NAME, ServiceConfig
from outrider.cluster.router.fleet import FleetSnapshot, PolicyMode
from outrider.cluster.scaling.serve_scaling import drafter_deployment
from outrider.lab.demo.waiting import show_wait

POLL_S = 0.2
HEARD_S = 2 * REPORT_INTERVAL_S  # until verifiers have reported and new requests are planned by the new mode


class Fleet:
    """The running service behind its public ports."""

    def __init__(self, config: ServiceConfig) -> None:
        self._router = serve.get_deployment_handle("Router", APP_NAME)
        self._drafter = serve.get_deployment_handle(drafter_deployment(next(iter(config.pools))), APP_NAME)

    async def pin_drafts(self) -> None:
        """Have everybody draft, whatever it costs, as an operator may."""
        await self._router.reconfigure.remote({"mode": PolicyMode.ALWAYS.value})
        await asyncio.sleep(HEARD_S)

    async def linked_drafters(self) -> frozenset[str]:
        """Return the drafters that every verifier has a link to."""
        snapshot: FleetSnapshot = await self._router.snapshot.remote()
        linked = [frozenset(state.report.drafters_up) for state in snapshot.verifiers]
        return frozenset.intersection(*linked) if linked else frozenset()

    async def wait_for_drafter(self, timeout_s: float, but: frozenset[str] = frozenset()) -> bool:
        """Wait until a drafter is linked, one `but` those; tell whether it was in time."""
        begin_s = time.monotonic()
        with show_wait("waiting for a drafter", timeout_s) as on_work:
            while (passed_s := time.monotonic() - begin_s) < timeout_s:
                if await self.linked_drafters() - but:
                    on_work(timeout_s, "linked")
                    return True
                on_work(passed_s, "none yet")
                await asyncio.sleep(POLL_S)
        return False

    async def drafter_pid(self) -> int:
        """Return the process in which a drafter of the first pool drafts."""
        pids: list[int] = await self._drafter.rank_pids.remote()
        return pids[0]
