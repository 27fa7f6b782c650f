"""Real gRPC servers on an event loop that outlives the examples of a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

import grpc

from fuzz.tally import TALLY

ServedT = TypeVar("ServedT")
CALL_TIMEOUT_S = 20.0
# What a client may be told that did wrong; INTERNAL and UNKNOWN are faults of ours, DEADLINE_EXCEEDED is a hang.
WRITE_AFTER_END = "Internal error from Core"  # what grpc's client says of its own write to a stream that has ended
CLIENT_STATUSES = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class Loop:
    """An event loop that runs one example after the other."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner

    def run(self, example: Coroutine[Any, Any, ServedT]) -> ServedT:
        return self._runner.run(asyncio.wait_for(example, 2 * CALL_TIMEOUT_S))


@contextlib.contextmanager
def kept_open(context: AbstractAsyncContextManager[ServedT]) -> Iterator[tuple[Loop, ServedT]]:
    """Enter an async context on a loop of its own; yields the loop and what the context yields."""
    with asyncio.Runner() as runner:
        served = runner.run(context.__aenter__())
        try:
            yield Loop(runner), served
        finally:
            runner.run(context.__aexit__(None, None, None))


async def status_of(call: Any, target: str) -> None:
    """Read a call to its end, check that its status blames the client at worst, and count it."""
    with contextlib.suppress(grpc.aio.AioRpcError):  # its code is read below
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        else:
            async for _ in call:
                continue
    code, details = await call.code(), await call.details()
    if details == WRITE_AFTER_END:
        TALLY.count(target, "ended before all was written")
    else:
        assert code in CLIENT_STATUSES, f"{code}: {details}"
        TALLY.count(target, code.name)
