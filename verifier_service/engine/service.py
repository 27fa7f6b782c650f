"""The verifier's gRPC service for gateways: one call per request; cancelling the call stops the request.

Between requests a gateway calls what a trainer asks for.

Only translates: a request's bytes pass to the engine unopened but for its id, outputs come back per request through a
queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

import grpc

from outrider.proto import link_pb2, link_pb2_grpc
from outrider.verifier_service.links.control_table import ControlTable, serve_control
from outrider.verifier_service.links.handover_calls import HandoverCalls
from outrider.verifier_service.messages.engine import Cancel
from outrider.verifier_service.messages.link import ACCEPTED
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import encode, request_id_of


class EngineLostError(ConnectionError):
    """The engine ended while requests were running; another verifier can continue them from the published tokens."""


class RequestTable:
    """The requests of all open calls."""

    def __init__(self, send: Callable[[bytes | Cancel], None]) -> None:
        """`send` hands the engine an encoded `GenerationRequest`, or what cancels one."""
        self._send = send
        self._queues: dict[str, asyncio.Queue[RequestOutput | EngineLostError]] = {}

    def __len__(self) -> int:
        return len(self._queues)

    async def stream(self, request: bytes) -> AsyncGenerator[RequestOutput | None]:
        """Yield None once the engine has the request, then its outputs; closing the generator early cancels it.

        Raises `WireError` for what is no request, `ValueError` for an id that is running already, `ConnectionError`
        when there is no engine. A request whose other fields are wrong the engine answers by the error.
        """
        request_id = request_id_of(request, GenerationRequest)
        if request_id in self._queues:
            raise ValueError(f"request_id: {request_id!r} is already running")
        queue = self._queues[request_id] = asyncio.Queue()
        is_finished = False
        try:
            self._send(request)
            yield None
            while not is_finished:
                output = await queue.get()
                if isinstance(output, EngineLostError):
                    is_finished = True  # no engine is left to send Cancel to
                    raise output
                is_finished = output.finish_reason is not None
                yield output
        finally:
            del self._queues[request_id]
            if not is_finished:
                with contextlib.suppress(ConnectionError):  # no engine, nothing to cancel in it
                    self._send(Cancel(request_id=request_id))

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Queue outputs for their calls; drop those of closed calls."""
        for output in outputs:
            if (queue := self._queues.get(output.request_id)) is not None:
                queue.put_nowait(output)

    def fail(self, reason: str) -> None:
        """Raise `EngineLostError` in every open call."""
        for queue in self._queues.values():
            queue.put_nowait(EngineLostError(reason))


class VerifierLinkServicer(link_pb2_grpc.VerifierLinkServicer):
    """Serve `Generate` and `Control` to gateways, and `TakeKV` to other verifiers."""

    def __init__(self, table: RequestTable, control: ControlTable, handovers: HandoverCalls | None = None) -> None:
        """Without `handovers`, no KV is given: other verifiers' calls are not implemented."""
        self._table, self._control, self._handovers = table, control, handovers

    async def Control(self, frame: link_pb2.Frame, context: grpc.aio.ServicerContext) -> link_pb2.Frame:
        return await serve_control(self._control.call, frame, context)

    async def Generate(self, frame: link_pb2.Frame, context: grpc.aio.ServicerContext) -> AsyncIterator[link_pb2.Frame]:
        try:
            async with contextlib.aclosing(self._table.stream(frame.payload)) as outputs:
                async for output in outputs:
                    if output is None:
                        yield link_pb2.Frame(payload=ACCEPTED)
                        continue
                    if output.finish_reason is FinishReason.ERROR:
                        raise ValueError(output.error)
                    yield link_pb2.Frame(payload=encode(output))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except ConnectionError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    async def TakeKV(self, frame: link_pb2.Frame, context: grpc.aio.ServicerContext) -> AsyncIterator[link_pb2.Frame]:
        if self._handovers is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this engine gives no KV to others")
        else:
            try:
                async with contextlib.aclosing(self._handovers.give(frame.payload)) as payloads:
                    async for payload in payloads:
                        yield link_pb2.Frame(payload=payload)
            except ValueError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            except ConnectionError as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
