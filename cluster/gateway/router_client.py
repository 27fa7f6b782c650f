"""A gateway's view of the fleet: it follows the router's news, and places its requests by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from outrider.cluster.common.errors import Overloaded, Unavailable
from outrider.cluster.common.reports import NoAnswerError, answers_of
from outrider.cluster.gateway.admission import OwnQueue, refusal
from outrider.cluster.router.fleet import Assignment, FleetSnapshot, RouteAsk
from outrider.cluster.router.news import FleetNews
from outrider.cluster.router.routing import NoVerifierError
from outrider.cluster.router.view import FleetView
from outrider.verifier_service.messages.wire import decode

logger = logging.getLogger(__name__)

NEWS_TIMEOUT_S = 3.0  # the router says something more often
RETRY_INTERVAL_S = 0.5  # while it is away
POLL_S = 0.1


class RouterClient:
    """What is known of the fleet; while the router is away, its last news."""

    def __init__(self, router: Any, gateway_id: str) -> None:
        """`router`: its deployment's handle. `gateway_id`: who follows it."""
        self.view = FleetView()
        self._router, self._gateway_id = router, gateway_id

    @property
    def snapshot(self) -> FleetSnapshot | None:
        """The fleet and what was decided; None: the router was not heard yet."""
        return self.view.snapshot

    def route(self, ask: RouteAsk) -> Assignment:
        """Choose for a new request; raises `Unavailable` when there is no verifier."""
        try:
            return self.view.place(ask, time.time())
        except NoVerifierError as error:
            raise Unavailable("no verifier is ready") from error

    def place_of(self, ask: RouteAsk) -> Assignment | None:
        """Return where a request would go; None: there is no verifier."""
        try:
            return self.view.place_of(ask, time.time())
        except NoVerifierError:
            return None

    @property
    def num_verifiers(self) -> int:
        return 0 if self.view.fleet is None else len(self.view.fleet.verifiers)

    def refusal(self, own: OwnQueue, *, priority: int, max_queued_requests: int) -> Overloaded | Unavailable | None:
        """Return why a new request is refused; None: it is admitted."""
        if self.view.fleet is None:
            return None
        return refusal(
            self.view.fleet,
            own,
            priority=priority,
            max_queued_requests=max_queued_requests,
            now_s=time.time(),
            policy=self.view.policy,
        )

    def has_verifier_at(self, endpoint: str) -> bool:
        """Return whether there is a verifier at an endpoint."""
        verifiers = () if self.view.fleet is None else self.view.fleet.verifiers
        return any(state.report.endpoint == endpoint for state in verifiers)

    def drafters_of(self, verifier_id: str) -> frozenset[str]:
        """Return the drafters that a verifier has links to."""
        reports = () if self.view.fleet is None else (state.report for state in self.view.fleet.verifiers)
        return frozenset(*(report.linked_drafters for report in reports if report.verifier_id == verifier_id))

    async def max_model_len(self) -> int:
        """Wait for the first verifier; return the longest sequence that every verifier can hold."""
        while True:
            verifiers = () if self.view.fleet is None else self.view.fleet.verifiers
            lengths = [length for state in verifiers if (length := state.report.max_model_len) is not None]
            if lengths:
                return min(lengths)
            await asyncio.sleep(POLL_S)

    async def follow(self) -> None:
        """Hear the router's news, forever; while it is away, the last ones stay."""
        while True:
            try:
                await self._hear()
            except NoAnswerError as error:
                logger.warning("the router did not answer: %s", error)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def refresh(self) -> None:
        """Hear how all is now; what is known stays if the router does not answer."""
        try:
            await self._hear(is_for_all=True)
        except NoAnswerError as error:
            logger.warning("the router did not answer: %s", error)

    async def _hear(self, *, is_for_all: bool = False) -> None:
        """Take the news of one call; or all that there is, which comes first."""
        ask = self.view.ask(self._gateway_id, is_for_all=is_for_all)
        news = answers_of(self._router.news, ask, timeout_s=NEWS_TIMEOUT_S)
        async with contextlib.aclosing(news) as payloads:
            async for payload in payloads:
                told: FleetNews = decode(payload, (FleetNews,))
                self.view.take(told)
                if is_for_all:
                    return
