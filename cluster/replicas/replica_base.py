"""A Serve replica around an engine, whatever the engine is for: it reports while the engine lives, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import Any

from ray import serve

from outrider.cluster.common.logs import configure_logging
from outrider.cluster.common.reports import REPORT_INTERVAL_S, Reports, ask_router, news_or_interval
from outrider.cluster.config.pools_config import PoolsConfig
from outrider.cluster.replicas.engine_host import EngineHost


def own_id() -> str:
    """Return the id that Serve has given this replica."""
    return str(serve.get_replica_context().replica_id.unique_id)


class ReplicaBase:
    """A replica around one engine. The router forgets it when it falls silent, and at once when it ends."""

    report_interval_s = REPORT_INTERVAL_S  # at most; what is new in `_news` is reported at once

    def __init__(self, config: PoolsConfig, report: Any, *, name: str, timeout_s: float, remove: Any = None) -> None:
        """`report` and `remove` are methods of the router's handle; `remove` forgets the replica `name` is of.

        None: the router has nothing to remove. `name` is "kind/id"; an engine silent for `timeout_s` has failed.
        """
        configure_logging(config.log_format, replica=name)
        self._host = EngineHost(on_message=self._on_update, on_failure=self._on_failure, timeout_s=timeout_s)
        self._report_to, self._remove_from = report, remove
        self._id = name.partition("/")[2]
        self._epoch = time.time_ns()
        self._drain_timeout_s = config.drain_timeout_s
        self._reports = Reports()
        self._news = asyncio.Event()
        self._is_draining = False

    def _on_update(self, update: Any) -> None:
        """Take a message of the engine."""
        raise NotImplementedError

    def _on_failure(self, reason: str) -> None:
        """Fail whatever waits for the engine."""
        raise NotImplementedError

    def _report(self) -> object | None:
        """Return what the router is to know; None: there is nothing yet."""
        raise NotImplementedError

    async def _follow(self, answer: Any) -> None:
        """Follow the router's answer to a report."""

    async def _drain(self) -> None:
        """Let go of what runs here; raises `ConnectionError` without an engine."""

    async def _report_forever(self) -> None:
        """Report while the engine lives: a silent replica gets no new requests."""
        with contextlib.suppress(ConnectionError):  # the engine may end while the router answers
            while self._host.failure is None:
                await self._tell_router()
                await news_or_interval(self._news, self.report_interval_s)
        await self._leave()

    async def _tell_router(self) -> None:
        report = self._report()
        if report is None or not self._reports.take(report):
            return
        answer = await ask_router(self._report_to, report)
        if answer is not None:
            await self._follow(answer)

    async def _leave(self) -> None:
        if self._remove_from is not None:
            await ask_router(self._remove_from, self._id)

    async def pid(self) -> int:
        """Return the pid of this replica's shell process."""
        return os.getpid()

    async def rank_pids(self) -> list[int]:
        """Return the pids of this replica's ranks, rank 0 first."""
        return await self._host.rank_pids()

    async def check_health(self) -> None:
        """Raise if this replica can no longer do its work: Serve then replaces it."""
        self._host.check()

    async def __del__(self) -> None:
        with contextlib.suppress(ConnectionError):  # the engine may end before its requests do
            await self._drain()
        await self._host.tasks.stop()  # or a last report would register it again
        await self._leave()
        await self._host.close()
