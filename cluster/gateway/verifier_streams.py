"""Requests' streams from verifiers: all of one verifier come over one gRPC stream, a step's outputs in one message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import grpc

from outrider.cluster.common.errors import InvalidRequest
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.links.grpc_channel import LinkCredentials, metadata_of, open_channel
from outrider.verifier_service.links.outbox import Outbox
from outrider.verifier_service.messages.engine import Cancel
from outrider.verifier_service.messages.link import payloads_of
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput
from outrider.verifier_service.messages.requests_link import TO_GATEWAY, Accepted, Refused, StepOutputs
from outrider.verifier_service.messages.wire import WireError, decode

ACCEPT_TIMEOUT_S = 5.0  # a verifier that has not acknowledged the request by then is lost


class VerifierLost(Exception):
    """A stream ended before its request, and the request is not known to be the cause."""

    def __init__(self, verifier_id: str, reason: str, *, was_accepted: bool) -> None:
        super().__init__(reason)
        self.verifier_id = verifier_id
        self.was_accepted = was_accepted  # the engine had the request


_News = Accepted | Refused | RequestOutput


class _Link:
    """The stream to one verifier, which all requests there share. It ends when it is closed, or with the verifier."""

    def __init__(self, endpoint: str, credentials: LinkCredentials | None, gateway_id: str) -> None:
        self._channel = open_channel(endpoint, credentials)
        self._outbox = Outbox(gateway_id)
        stub, metadata = link_pb2_grpc.VerifierLinkStub(self._channel), metadata_of(credentials)
        self._call = stub.Serve(self._outbox.frames(), metadata=metadata)
        self._queues: dict[str, asyncio.Queue[_News]] = {}
        self._reading = asyncio.create_task(self._read())

    @property
    def num_requests(self) -> int:
        return len(self._queues)

    @property
    def has_ended(self) -> bool:
        return self._reading.done()

    def begin(self, message: GenerationRequest) -> asyncio.Queue[_News]:
        """Send a request; return the queue of what the verifier says of it."""
        queue = self._queues[message.request_id] = asyncio.Queue()
        self._outbox.put(message)
        return queue

    def end(self, request_id: str, *, is_over: bool) -> None:
        """Hear no more of a request; one that is not over is cancelled."""
        del self._queues[request_id]
        if not is_over:
            self._outbox.put(Cancel(request_id=request_id))

    async def _read(self) -> None:
        """Deliver what comes, until the stream ends: then all requests are lost."""
        reason = "it ended the stream"
        try:
            async for frame in self._call:
                for payload in payloads_of(frame):
                    self._deliver(decode(payload, TO_GATEWAY))
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except WireError as error:
            reason = str(error)
        finally:
            self._call.cancel()
            for request_id, queue in self._queues.items():
                queue.put_nowait(Refused(request_id=request_id, error=reason, is_lost=True))

    def _deliver(self, message: Accepted | Refused | StepOutputs) -> None:
        """Queue news for their requests; those of requests that were cancelled are dropped."""
        for news in message.outputs if isinstance(message, StepOutputs) else (message,):
            if (queue := self._queues.get(news.request_id)) is not None:
                queue.put_nowait(news)

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()


class VerifierStreams:
    """A gateway's open streams."""

    def __init__(self, gateway_id: str, credentials: LinkCredentials | None, has_left: Callable[[str], bool]) -> None:
        """`has_left` tells of an endpoint whether its verifier has left the fleet."""
        self._gateway_id = gateway_id
        self._credentials = credentials
        self._has_left = has_left
        self._links: dict[str, _Link] = {}

    async def stream(
        self, verifier_id: str, endpoint: str, message: GenerationRequest
    ) -> AsyncGenerator[RequestOutput]:
        """Stream one request from one verifier; raises `VerifierLost`, or the error that it answers."""
        link = self._link_to(endpoint)
        queue = link.begin(message)
        was_accepted = is_over = False
        try:
            async with asyncio.timeout(ACCEPT_TIMEOUT_S):
                news = await queue.get()
            while not isinstance(news, Refused):
                if isinstance(news, Accepted):
                    was_accepted = True
                elif news.finish_reason is FinishReason.ERROR:
                    news = Refused(request_id=news.request_id, error=news.error or "the verifier refused the request")
                    break
                else:
                    is_over = news.finish_reason is not None
                    yield news
                    if is_over:
                        return
                news = await queue.get()
            assert isinstance(news, Refused)
            is_over = True
            if not news.is_lost:
                raise InvalidRequest(news.error)
            raise VerifierLost(verifier_id, news.error, was_accepted=was_accepted)
        except TimeoutError as error:
            self._drop(endpoint, link)
            reason = f"no answer within {ACCEPT_TIMEOUT_S:g} s"
            raise VerifierLost(verifier_id, reason, was_accepted=False) from error
        finally:
            link.end(message.request_id, is_over=is_over)
            if link.num_requests == 0 and self._links.get(endpoint) is not link:
                await link.close()
            await self._close_unused()

    def _link_to(self, endpoint: str) -> _Link:
        link = self._links.get(endpoint)
        if link is None or link.has_ended:
            link = self._links[endpoint] = _Link(endpoint, self._credentials, self._gateway_id)
        return link

    def _drop(self, endpoint: str, lost: _Link) -> None:
        """Drop the link to a verifier that does not answer: the next request opens a new one."""
        if self._links.get(endpoint) is lost:
            del self._links[endpoint]

    async def _close_unused(self) -> None:
        """Close links without requests that have ended, or whose verifiers have left the fleet."""
        unused = [
            endpoint
            for endpoint, link in self._links.items()
            if link.num_requests == 0 and (link.has_ended or self._has_left(endpoint))
        ]
        for link in [self._links.pop(endpoint) for endpoint in unused]:
            await link.close()

    async def close(self) -> None:
        for link in list(self._links.values()):
            await link.close()
