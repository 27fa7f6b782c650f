"""A gateway's way to the others of its service."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from prometheus_client.metrics_core import Metric

from outrider.cluster.common.reports import ask_router
from outrider.cluster.gateway.rollout_memory import Recorded
from outrider.cluster.peers.messages import ANSWERS, AskMetrics, Meet, TellHistory
from outrider.cluster.peers.registry import MEET_INTERVAL_S
from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.links.grpc_channel import LinkCredentials, metadata_of, open_channel
from outrider.verifier_service.messages.wire import WireError, decode, encode

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 5.0
SCRAPE_TIMEOUT_S = 1.0  # a scrape does not wait for a gateway that hangs
RETRY_INTERVAL_S = 0.5  # while the router is away
_NO_PINGS = ("grpc.keepalive_permit_without_calls", 0)  # at rest
MAX_TOLD_TOKENS = 1 << 18  # of one message
MAX_BEHIND = 1 << 14  # responses that wait for a gateway; older ones are dropped, and it drafts without them


@dataclass(slots=True)
class _Other:
    """One other gateway."""

    endpoint: str
    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...]  # of every call
    past: Iterator[Recorded] = field(default_factory=lambda: iter(()))  # of before it came
    untold: deque[Recorded] = field(default_factory=lambda: deque(maxlen=MAX_BEHIND))
    telling: asyncio.Task[None] | None = None
    is_missed: bool = False  # the router did not know it, as one that has just started

    def next_untold(self) -> tuple[Recorded, ...]:
        """Take what is told next, in one message."""
        responses, num_tokens = list[Recorded](), 0
        while num_tokens < MAX_TOLD_TOKENS:
            response = next(self.past, None) or (self.untold.popleft() if self.untold else None)
            if response is None:
                break
            responses.append(response)
            num_tokens += len(response.token_ids)
        return tuple(responses)

    async def ask(self, message: Any, timeout_s: float) -> Any:
        """Return the answer; raises `ConnectionError`."""
        frame = link_pb2.Frame(payload=encode(message))
        try:
            answer = await link_pb2_grpc.GatewayLinkStub(self.channel).Ask(
                frame, timeout=timeout_s, metadata=self.metadata
            )
            return decode(answer.payload, ANSWERS)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from error
        except WireError as error:
            raise ConnectionError(str(error)) from error

    async def close(self) -> None:
        if self.telling is not None:
            self.telling.cancel()
            await asyncio.gather(self.telling, return_exceptions=True)
        await self.channel.close()


class Others:
    """The other gateways: who they are, what they answer, and what they are told.

    One that does not answer is left out: what it has ends with it.
    """

    def __init__(self, gateway_id: str, credentials: LinkCredentials | None = None) -> None:
        self._gateway_id = gateway_id
        self._credentials = credentials
        self._others: dict[str, _Other] = {}

    @property
    def known(self) -> frozenset[str]:
        """Their ids."""
        return frozenset(self._others)

    async def follow(self, router: Any, endpoint: str, *, wants_history: bool) -> None:
        """Stay known to the router, and know the others by it, forever.

        `endpoint`: where this gateway answers. `wants_history`: it remembers rollouts, and begins with the memory of
        one that is there.
        """
        while True:
            found: Mapping[str, str] | None = await ask_router(router.meet_gateway, self._gateway_id, endpoint)
            if found is None:
                await asyncio.sleep(RETRY_INTERVAL_S)
                continue
            if await self.take(found, endpoint, wants_history=wants_history):
                wants_history = False
            await asyncio.sleep(MEET_INTERVAL_S)

    async def take(self, found: Mapping[str, str], endpoint: str, *, wants_history: bool) -> bool:
        """Know the others that the router has found, and be known by them; return whether one tells its history."""
        for gateway_id, other in list(self._others.items()):
            if gateway_id not in found and other.is_missed:
                await self._others.pop(gateway_id).close()
            other.is_missed = gateway_id not in found
        new = [gateway_id for gateway_id in sorted(found) if gateway_id not in self._others]
        self.hear_of(found)
        is_told = False
        for gateway_id in new:
            asks = wants_history and not is_told
            greeting = Meet(gateway_id=self._gateway_id, endpoint=endpoint, wants_history=asks)
            is_told |= await self.ask_one(gateway_id, greeting) is not None and asks
        return is_told

    def hear_of(self, found: Mapping[str, str]) -> None:
        """Know others by their endpoints, beside those that are known."""
        for gateway_id, endpoint in found.items():
            if gateway_id not in self._others:
                self._others[gateway_id] = _Other(
                    endpoint, open_channel(endpoint, self._credentials, _NO_PINGS), metadata_of(self._credentials)
                )

    async def ask(self, message: Any, timeout_s: float = ASK_TIMEOUT_S) -> dict[str, Any]:
        """Return what each of the others answers, by its id."""
        ids = list(self._others)
        answers = await asyncio.gather(*(self.ask_one(id_, message, timeout_s) for id_ in ids))
        return {id_: answer for id_, answer in zip(ids, answers, strict=True) if answer is not None}

    async def ask_one(self, gateway_id: str, message: Any, timeout_s: float = ASK_TIMEOUT_S) -> Any | None:
        """Return what one answers; None: it is unknown, or does not."""
        other = self._others.get(gateway_id)
        if other is None:
            return None
        try:
            return await other.ask(message, timeout_s)
        except ConnectionError as error:
            logger.warning("gateway %s does not answer: %s", gateway_id, error)
            return None

    async def metrics(self) -> dict[str, list[Metric]]:
        """Return what each of the others publishes, by its id."""
        answers = await self.ask(AskMetrics(), SCRAPE_TIMEOUT_S)
        return {id_: [family.metric for family in answer.families] for id_, answer in answers.items()}

    def tell(self, response: Recorded) -> None:
        """Have all others remember a response of a rollout; what one does not take is dropped."""
        for gateway_id, other in self._others.items():
            other.untold.append(response)
            self._begin_to_tell(gateway_id, other)

    def tell_past(self, gateway_id: str, past: Iterable[Recorded]) -> None:
        """Have one remember the responses of before it came."""
        other = self._others[gateway_id]
        other.past = iter(past)
        self._begin_to_tell(gateway_id, other)

    def _begin_to_tell(self, gateway_id: str, other: _Other) -> None:
        if other.telling is None or other.telling.done():
            other.telling = asyncio.get_running_loop().create_task(self._tell(gateway_id, other))

    async def _tell(self, gateway_id: str, other: _Other) -> None:
        while responses := other.next_untold():
            await self.ask_one(gateway_id, TellHistory(responses=responses))

    async def close(self) -> None:
        """Leave the others."""
        others, self._others = list(self._others.values()), {}
        for other in others:
            await other.close()


Answer = Callable[[Any], Any]  # of one type of message


class GatewayLinkServicer:
    """Serves `outrider.link.v1.GatewayLink`."""

    def __init__(self, answers: Mapping[type, Answer]) -> None:
        self._answers = answers

    async def Ask(self, request: link_pb2.Frame, context: grpc.aio.ServicerContext) -> link_pb2.Frame:
        try:
            message = decode(request.payload, tuple(self._answers))
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return link_pb2.Frame(payload=encode(self._answers[type(message)](message)))
