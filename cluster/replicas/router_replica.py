"""The router as a Serve deployment of exactly one replica: Serve restarts it, and reports rebuild its state."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from outrider.cluster.peers.registry import Registry
from outrider.cluster.router.fleet import (
    Directive,
    DrafterReport,
    FleetSnapshot,
    RouteAnswer,
    RouteAsk,
    RouterPolicy,
    VerifierReport,
    with_changes,
)
from outrider.cluster.router.router import RouterCore
from outrider.cluster.router.routing import NoVerifierError
from outrider.drafter_service.learning.messages import LearnerStatus


class RouterReplica:
    """Pass calls to `RouterCore`, with the time."""

    def __init__(self, policy: RouterPolicy) -> None:
        self._configured = policy
        self._core = RouterCore(policy)
        self._gateways = Registry()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change the policy: settings that `user_config` does not name are as configured at start.

        Serve calls this at start and whenever a deployed `user_config` changes, without a restart. Raises `ValueError`
        naming the setting, and keeps the old policy.
        """
        self._core.policy = with_changes(self._configured, user_config)

    async def report_verifier(self, report: VerifierReport) -> Directive:
        return self._core.report_verifier(report, time.time())

    async def report_drafter(self, report: DrafterReport) -> None:
        self._core.report_drafter(report, time.time())

    async def report_learner(self, status: LearnerStatus) -> None:
        self._core.report_learner(status, time.time())

    async def meet_gateway(self, gateway_id: str, endpoint: str) -> Mapping[str, str]:
        """Note where a gateway listens for the others; return where they do, by their ids."""
        return self._gateways.meet(gateway_id, endpoint, time.time())

    async def stop_taking(self) -> None:
        """Have every gateway refuse new requests: the service stops once its streams have ended."""
        self._core.is_stopping = True

    async def pid(self) -> int:
        return os.getpid()

    async def remove(self, replica_id: str) -> None:
        self._core.remove(replica_id)

    async def route(self, ask: RouteAsk) -> RouteAnswer | None:
        """Place a request; None: the router has just started, and a verifier may be up that has not reported."""
        now_s = time.time()
        try:
            return RouteAnswer(self._core.route(ask, now_s))
        except NoVerifierError:
            return None if self._core.is_new(now_s) else RouteAnswer(None)

    async def snapshot(self) -> FleetSnapshot:
        return self._core.snapshot(time.time())
