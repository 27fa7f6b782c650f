"""The router as a Serve deployment of exactly one replica: Serve restarts it, and reports rebuild its state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from outrider.cluster.peers.registry import Registry
from outrider.cluster.router.fleet import (
    Directive,
    DrafterReport,
    FleetSnapshot,
    RouterPolicy,
    VerifierReport,
    with_changes,
)
from outrider.cluster.router.news import Cursor, NewsAsk
from outrider.cluster.router.router import RouterCore
from outrider.drafter_service.learning.messages import LearnerStatus
from outrider.verifier_service.messages.wire import encode

NEWS_CALL_S = 2.0  # a call for news lasts so long: at rest, one comes so often
NEWS_INTERVAL_S = 0.05  # between two news at least: what came meanwhile is told together
LOOK_INTERVAL_S = 0.5  # while nothing is reported


class RouterReplica:
    """Pass calls to `RouterCore`, with the time, and its news to gateways."""

    def __init__(self, policy: RouterPolicy) -> None:
        self._configured = policy
        self._core = RouterCore(policy, epoch=time.time_ns())
        self._gateways = Registry()
        self._news = asyncio.Event()  # set, and replaced, when something is told
        self._told_version, self._told_s = 0, 0.0
        self._spreading: asyncio.TimerHandle | None = None
        self._encoded: tuple[tuple[Cursor | None, int], float, Cursor, bytes] | None = None  # the last news

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Change the policy: settings that `user_config` does not name are as configured at start.

        Serve calls this at start and whenever a deployed `user_config` changes, without a restart. Raises `ValueError`
        naming the setting, and keeps the old policy.
        """
        self._core.policy = with_changes(self._configured, user_config)

    async def report_verifier(self, report: VerifierReport) -> Directive:
        directive = self._core.report_verifier(report, time.time())
        self._spread()
        return directive

    async def report_drafter(self, report: DrafterReport) -> None:
        self._core.report_drafter(report, time.time())
        self._spread()

    async def report_learner(self, status: LearnerStatus) -> None:
        self._core.report_learner(status, time.time())
        self._spread()

    async def meet_gateway(self, gateway_id: str, endpoint: str) -> Mapping[str, str]:
        """Note where a gateway listens for the others; return where they do, by their ids."""
        return self._gateways.meet(gateway_id, endpoint, time.time())

    async def stop_taking(self) -> None:
        """Have every gateway refuse new requests: the service stops once its streams have ended."""
        self._core.stop_taking()
        self._spread()

    async def pid(self) -> int:
        return os.getpid()

    async def remove(self, replica_id: str) -> None:
        self._core.remove(replica_id)
        self._spread()

    async def snapshot(self) -> FleetSnapshot:
        return self._core.snapshot(time.time())

    async def news(self, ask: NewsAsk) -> AsyncGenerator[bytes]:
        """Tell a gateway `FleetNews` as they come, the first at once, until the call has lasted `NEWS_CALL_S`.

        Then the gateway calls again: a router that Serve replaces ends soon, and one that hangs is noticed.
        """
        self._core.hear_gateway(ask)
        seen, clock = ask.seen, asyncio.get_running_loop().time
        end_s = clock() + NEWS_CALL_S
        while True:
            seen, payload = self._news_since(seen)
            yield payload
            while seen.version >= self._told_version:
                if clock() >= end_s:
                    return
                await self._wait_for_news(min(end_s, clock() + LOOK_INTERVAL_S))

    def _news_since(self, seen: Cursor | None) -> tuple[Cursor, bytes]:
        """Return encoded news; gateways that are told at the same time are told the same."""
        now_s, key = time.time(), (seen, self._core.version)
        if self._encoded is None or self._encoded[0] != key or now_s - self._encoded[1] > NEWS_INTERVAL_S:
            news = self._core.news(seen, now_s)
            self._encoded = key, now_s, news.cursor, encode(news)
        return self._encoded[2:]

    async def _wait_for_news(self, until_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._news.wait()
        self._core.look(time.time())  # nobody reports that a replica has fallen silent
        self._spread()

    def _spread(self) -> None:
        """Have what is new told: at once, or once `NEWS_INTERVAL_S` have passed since something was."""
        if self._spreading is None and self._core.version > self._told_version:
            loop = asyncio.get_running_loop()
            self._spreading = loop.call_at(max(loop.time(), self._told_s + NEWS_INTERVAL_S), self._tell)

    def _tell(self) -> None:
        self._spreading = None
        self._told_version, self._told_s = self._core.version, asyncio.get_running_loop().time()
        told, self._news = self._news, asyncio.Event()
        told.set()
