"""The verifier's gRPC service for gateways: one stream for each, over which all of its requests go.

Between requests a gateway calls what a trainer asks for.

Only translates: a request's bytes pass to the engine unopened but for its id, outputs pass to the gateway unopened.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

import grpc
import msgspec

from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.links.control_rules import NO_ORDERS, ControlRules
from outrider.verifier_service.links.control_table import ControlTable, serve_control
from outrider.verifier_service.links.handover_calls import NO_HANDOVERS, NoHandoverCalls
from outrider.verifier_service.links.outbox import Outbox
from outrider.verifier_service.messages.engine import Cancel, EngineLoad, Published
from outrider.verifier_service.messages.link import payloads_of, peek_type
from outrider.verifier_service.messages.request import GenerationRequest
from outrider.verifier_service.messages.requests_link import Accepted, Refused, StepOutputs
from outrider.verifier_service.messages.wire import WireError, decode, head_of


class GatewayStream:
    """What one gateway is told, in order."""

    def __init__(self) -> None:
        self._outbox = Outbox()
        self._step: list[msgspec.Raw] = []

    def tell(self, message: Accepted | Refused) -> None:
        self._outbox.put(message)

    def add(self, output: msgspec.Raw) -> None:
        """Add an output to the step's message."""
        self._step.append(output)

    def end_step(self) -> None:
        """Send what was added."""
        step, self._step = self._step, []
        self._outbox.put(StepOutputs.unopened(step))

    def close(self) -> None:
        """Tell nothing more."""
        self._outbox.close()

    def frames(self) -> AsyncGenerator[link_pb2.Frame]:
        """Yield what the gateway is sent, until the stream is closed."""
        return self._outbox.frames()


class RequestTable:
    """The requests of all gateways' streams."""

    def __init__(self, send: Callable[[bytes | Cancel], None], *, max_running: float = math.inf) -> None:
        """`send` hands the engine an encoded `GenerationRequest`, or what cancels one.

        `max_running`: requests that the engine runs at a time, as far as its KV allows.
        """
        self._send, self._max_running = send, max_running
        self._streams: dict[str, GatewayStream] = {}  # by request
        self.num_taken = 0  # requests, since the start
        self._room = max_running  # requests that run, where others wait
        self._new_ids: list[str] = []  # of requests taken since the engine's last load
        self._pending_ids: list[str] = []  # of those before it that were still on their way when it was made

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def num_pending(self) -> int:
        """How many requests the engine's last load does not include yet."""
        return sum(request_id in self._streams for request_id in (*self._new_ids, *self._pending_ids))

    def hear(self, load: EngineLoad) -> None:
        """Take the engine's load, which may be older than the last requests; the next one is not."""
        included = {request.request_id for request in load.requests}
        self._pending_ids = [request_id for request_id in self._new_ids if request_id not in included]
        self._new_ids = []
        self._room = load.num_running if load.num_waiting else self._max_running

    def take(self, stream: GatewayStream, payload: bytes) -> None:
        """Take a gateway's message; whether the engine has a request, or why not, is told to its stream.

        Raises `WireError` for what is neither a request nor a `Cancel`. A request whose other fields are wrong the
        engine answers by the error.
        """
        if peek_type(payload) == Cancel.__name__:
            self._cancel(stream, decode(payload, (Cancel,)).request_id)
            return
        head = head_of(payload, GenerationRequest)
        request_id = head.request_id
        if request_id in self._streams:
            stream.tell(Refused(request_id=request_id, error=f"request_id: {request_id!r} is already running"))
            return
        num_waiting = len(self._streams) + 1 - self._room
        if isinstance(head.most_waiting, int) and num_waiting > head.most_waiting:
            error = f"{num_waiting:.0f} requests would wait here, {head.most_waiting} may"
            stream.tell(Refused(request_id=request_id, error=error, is_lost=True, is_full=True))
            return
        self._streams[request_id] = stream
        try:
            self._send(payload)
        except ConnectionError as error:
            del self._streams[request_id]
            stream.tell(Refused(request_id=request_id, error=str(error), is_lost=True))
        else:
            self.num_taken += 1
            self._new_ids.append(request_id)
            stream.tell(Accepted(request_id=request_id, num_taken=self.num_taken))

    def close(self, stream: GatewayStream) -> None:
        """Cancel all requests of a stream that has ended."""
        for request_id in [request_id for request_id, own in self._streams.items() if own is stream]:
            self._cancel(stream, request_id)

    def _cancel(self, stream: GatewayStream, request_id: str) -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            with contextlib.suppress(ConnectionError):  # no engine, nothing to cancel in it
                self._send(Cancel(request_id=request_id))

    def deliver(self, outputs: Iterable[Published]) -> None:
        """Send outputs to their gateways, one message for each; drop those of requests that were cancelled."""
        told: dict[GatewayStream, None] = {}
        for output in outputs:
            if (stream := self._streams.get(output.request_id)) is None:
                continue
            stream.add(output.packed)
            told[stream] = None
            if output.is_last:
                del self._streams[output.request_id]
        for stream in told:
            stream.end_step()

    def fail(self, reason: str) -> None:
        """Tell all gateways that the engine was lost, and with it their requests."""
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            stream.tell(Refused(request_id=request_id, error=reason, is_lost=True))


class VerifierLinkServicer(link_pb2_grpc.VerifierLinkServicer):
    """Serve `Serve` and `Control` to gateways, and `TakeKV` to other verifiers."""

    def __init__(
        self,
        table: RequestTable,
        control: ControlTable,
        handovers: NoHandoverCalls = NO_HANDOVERS,
        rules: ControlRules = NO_ORDERS,
    ) -> None:
        """By default no KV is given: other verifiers' calls are not implemented. `rules`: of `Control`."""
        self._table, self._control, self._handovers, self._rules = table, control, handovers, rules

    async def Control(self, frame: link_pb2.Frame, context: grpc.aio.ServicerContext) -> link_pb2.Frame:
        return await serve_control(self._control.call, self._rules, frame, context)

    async def Serve(
        self, frames: AsyncIterator[link_pb2.Frame], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[link_pb2.Frame]:
        stream = GatewayStream()
        hearing = asyncio.create_task(self._hear(stream, frames))
        try:
            async with contextlib.aclosing(stream.frames()) as answers:
                async for answer in answers:
                    yield answer
            await hearing
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            hearing.cancel()
            self._table.close(stream)

    async def _hear(self, stream: GatewayStream, frames: AsyncIterator[link_pb2.Frame]) -> None:
        """Take a gateway's messages until it says no more, or says what cannot be read."""
        try:
            async for frame in frames:
                for payload in payloads_of(frame):
                    self._table.take(stream, payload)
        finally:
            stream.close()

    async def TakeKV(self, frame: link_pb2.Frame, context: grpc.aio.ServicerContext) -> AsyncIterator[link_pb2.Frame]:
        try:
            async with contextlib.aclosing(self._handovers.give(frame.payload)) as payloads:
                async for payload in payloads:
                    yield link_pb2.Frame(payload=payload)
        except NotImplementedError as error:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ConnectionError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
