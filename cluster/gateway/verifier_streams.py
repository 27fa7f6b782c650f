"""Requests' streams from verifiers: all of one verifier come over one gRPC stream, a step's outputs in one message.

No task stands between a message and its requests: who reads it passes each output on, to the end of the way.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

import grpc

from outrider.cluster.common.errors import InvalidRequest
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.links.grpc_channel import LinkCredentials, open_channel
from outrider.verifier_service.links.outbox import Outbox
from outrider.verifier_service.messages.engine import Cancel
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.link import payloads_of
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput
from outrider.verifier_service.messages.requests_link import TO_GATEWAY, Accepted, Refused, StepOutputs
from outrider.verifier_service.messages.wire import WireError, decode

ACCEPT_TIMEOUT_S = 5.0  # a verifier that has not acknowledged the request by then is lost
_SHORT_REASON = re.compile(r"([A-Za-z][A-Za-z_ ]{0,31})(:|$)")

Hear: TypeAlias = Callable[[RequestOutput], None]


class VerifierLost(Exception):
    """A stream ended before its request, and the request is not known to be the cause."""

    def __init__(self, verifier_id: str, reason: str, *, was_accepted: bool) -> None:
        super().__init__(reason)
        self.verifier_id = verifier_id
        self.was_accepted = was_accepted  # the engine had the request


class NotTaken(Exception):
    """A verifier could not take a request over; nothing was drawn."""

    @property
    def label(self) -> str:
        """The reason, for a metric: what stands before the colon, if it is short and plain."""
        found = _SHORT_REASON.match(str(self))
        return "other" if found is None else found[1].replace(" ", "_").lower()


class Witness(Protocol):
    """Who notes what a stream brings, beside its reader."""

    def hear(self, output: RequestOutput) -> None: ...

    def lose(self) -> None:
        """Note that the verifier was lost."""
        ...

    def close(self) -> None:
        """Note the stream's end."""
        ...


class Stream:
    """One request at one verifier. It begins at once; outputs that nobody reads yet wait."""

    def __init__(
        self, link: _Link, verifier_id: str, endpoint: str, message: GenerationRequest, witness: Witness | None
    ) -> None:
        self.verifier_id = verifier_id
        self.place = KVSource(endpoint=endpoint, request_id=message.request_id)
        self.source = message.kv_source  # what it takes over
        self._link = link
        self._witness = witness
        self._hear: Hear | None = None  # of the present run
        self._last: asyncio.Future[RequestOutput] | None = None  # of the present run
        self._waiting: deque[RequestOutput] = deque()
        self._failure: Exception | None = None
        self._was_accepted = self._is_over = self._has_ended = False
        self._overdue = asyncio.get_running_loop().call_later(ACCEPT_TIMEOUT_S, self._expire)
        link.begin(message, self)

    async def run(self, hear: Hear) -> RequestOutput:
        """Pass outputs on as they come, until the request ends or stands still here; return the last one.

        Raises `NotTaken`, `VerifierLost`, the error that the verifier answers, or that of `hear`.
        """
        self._hear, self._last = hear, asyncio.get_running_loop().create_future()
        while self._waiting and not self._last.done():
            self._pass_on(self._waiting.popleft())
        if self._failure is not None and not self._last.done():
            self._last.set_exception(self._failure)
        try:
            return await self._last
        finally:
            self._hear = self._last = None

    def take(self, news: Accepted | Refused | RequestOutput) -> None:
        """Take what the verifier says of the request."""
        self._overdue.cancel()
        if isinstance(news, RequestOutput):
            if self._last is None or self._last.done():
                self._waiting.append(news)
            else:
                self._pass_on(news)
        elif isinstance(news, Accepted):
            self._was_accepted = True
        else:
            self._is_over = True
            self._fail(self._lost(news.error) if news.is_lost else InvalidRequest(news.error))

    def end(self) -> None:
        """Hear no more; a verifier that still has the request frees what it holds for it."""
        if not self._has_ended:
            self._has_ended = True
            self._overdue.cancel()
            self._link.end(self.place.request_id, is_over=self._is_over)
            if self._witness is not None:
                self._witness.close()

    def _pass_on(self, output: RequestOutput) -> None:
        reason, is_held, last = output.finish_reason, output.is_held, self._last
        assert self._hear is not None
        assert last is not None
        self._is_over = reason is not None
        if reason is FinishReason.ERROR:
            self._fail(InvalidRequest(output.error or "the verifier refused the request"))
            return
        if self._witness is not None:
            self._witness.hear(output)
        if reason is FinishReason.NOT_TAKEN:
            is_taker = self.source is not None
            self._fail(
                NotTaken(output.error or "") if is_taker else self._lost("it took nothing over, where nothing was")
            )
            return
        try:
            self._hear(output)
        except Exception as error:  # the reader's own, or a bug: it ends this request alone
            self._fail(error)
            return
        if (reason is not None or is_held) and not last.done():
            last.set_result(output)

    def _expire(self) -> None:
        self._link.drop()
        self._fail(self._lost(f"no answer within {ACCEPT_TIMEOUT_S:g} s"))

    def _lost(self, reason: str) -> VerifierLost:
        if self._witness is not None:
            self._witness.lose()
        return VerifierLost(self.verifier_id, reason, was_accepted=self._was_accepted)

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if self._last is not None and not self._last.done():
            self._last.set_exception(error)


class _Link:
    """The stream to one verifier, which all requests there share. It ends when it is closed, or with the verifier."""

    def __init__(self, streams: VerifierStreams, endpoint: str) -> None:
        self._streams = streams
        self._endpoint = endpoint
        self._channel = open_channel(endpoint, streams.credentials)
        self._outbox = Outbox(streams.gateway_id)
        self._call = link_pb2_grpc.VerifierLinkStub(self._channel).Serve(self._outbox.frames())
        self._requests: dict[str, Stream] = {}
        self._is_dropped = self._has_ended = False
        self.reading = asyncio.create_task(self._read())

    def begin(self, message: GenerationRequest, stream: Stream) -> None:
        """Send a request, whose stream takes what the verifier says of it."""
        self._requests[message.request_id] = stream
        self._outbox.put(message)

    def end(self, request_id: str, *, is_over: bool) -> None:
        """Hear no more of a request; one that is not over is cancelled."""
        del self._requests[request_id]
        if not is_over:
            self._outbox.put(Cancel(request_id=request_id))
        if self._is_dropped and not self._requests and not self._has_ended:
            self.reading.cancel()

    def drop(self) -> None:
        """Send no further request here: the next one opens a new stream. Those that run go on."""
        self._is_dropped = True
        self._streams.forget(self._endpoint, self)

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
            self._has_ended = True
            self.drop()
            self._call.cancel()
            self._outbox.close()
            for request_id, stream in list(self._requests.items()):
                stream.take(Refused(request_id=request_id, error=reason, is_lost=True))
            await self._channel.close()

    def _deliver(self, message: Accepted | Refused | StepOutputs) -> None:
        """Hand news to their requests; those of requests that were cancelled are dropped."""
        for news in message.outputs if isinstance(message, StepOutputs) else (message,):
            if (stream := self._requests.get(news.request_id)) is not None:
                stream.take(news)


class VerifierStreams:
    """A gateway's open streams."""

    def __init__(self, gateway_id: str, credentials: LinkCredentials | None) -> None:
        self.gateway_id = gateway_id
        self.credentials = credentials
        self._links: dict[str, _Link] = {}
        self._reading: set[asyncio.Task[None]] = set()

    def open(
        self, verifier_id: str, endpoint: str, message: GenerationRequest, witness: Witness | None = None
    ) -> Stream:
        """Begin a request at a verifier."""
        link = self._links.get(endpoint)
        if link is None:
            link = self._links[endpoint] = _Link(self, endpoint)
            self._reading.add(link.reading)
            link.reading.add_done_callback(self._reading.discard)
        return Stream(link, verifier_id, endpoint, message, witness)

    def forget(self, endpoint: str, link: _Link) -> None:
        """Send no new request over a link."""
        if self._links.get(endpoint) is link:
            del self._links[endpoint]

    async def close(self) -> None:
        reading = list(self._reading)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
