"""Control calls to an engine in another process that are not answered yet."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import grpc

from outrider.proto import link_pb2
from outrider.verifier_service.links.control_rules import ControlRules
from outrider.verifier_service.messages.engine import CONTROLS, Control, ControlResult
from outrider.verifier_service.messages.wire import decode, encode


class Call(Protocol):
    """A message, or the answer to the one of the same id."""

    @property
    def call_id(self) -> str: ...


Result = TypeVar("Result", bound=Call)  # of an engine's calls: `ControlResult`


class ControlTable(Generic[Result]):
    """The pending calls of one process, by their `call_id`. All methods are for the event loop's thread."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        """`send` hands a message to the engine; raises `ConnectionError` if there is none."""
        self._send = send
        self._pending: dict[str, asyncio.Future[Result]] = {}

    def __len__(self) -> int:
        return len(self._pending)

    async def call(self, message: Call) -> Result:
        """Send a message and wait for its result, however long the engine takes.

        Raises `ValueError` for an id that waits already, `ConnectionError` if the engine is gone or goes meanwhile.
        A caller that stops waiting does not undo the call.
        """
        if message.call_id in self._pending:
            raise ValueError(f"call_id: {message.call_id!r} is not answered yet")
        future = self._pending[message.call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            return await future
        finally:
            del self._pending[message.call_id]

    def deliver(self, results: Iterable[Result]) -> None:
        """Answer calls; results of calls that nobody waits for are dropped."""
        for result in results:
            future = self._pending.get(result.call_id)
            if future is not None and not future.done():
                future.set_result(result)

    def fail(self, reason: str) -> None:
        """Raise `ConnectionError` in every pending call: the engine is gone."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ConnectionError(reason))


async def serve_control(
    call: Callable[[Control], Awaitable[ControlResult]],
    rules: ControlRules,
    frame: link_pb2.Frame,
    context: grpc.aio.ServicerContext,
) -> link_pb2.Frame:
    """Answer a gateway's `Control` call; `call` is that of a table, or raises as it does."""
    try:
        message = decode(frame.payload, CONTROLS)
        await rules.admit(message)
        return link_pb2.Frame(payload=encode(await call(message)))
    except (ValueError, ConnectionError, PermissionError) as error:
        code = grpc.StatusCode.INVALID_ARGUMENT
        if isinstance(error, ConnectionError):
            code = grpc.StatusCode.UNAVAILABLE
        elif isinstance(error, PermissionError):
            code = grpc.StatusCode.PERMISSION_DENIED
        await context.abort(code, str(error))
        raise
