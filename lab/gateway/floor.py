"""The floor: servers that do nothing but send, as little as asyncio and gRPC allow for the same bytes.

Over HTTP, a loop that writes every running request's next piece to its socket, a step after another. Over gRPC, a
grpc.aio servicer that sends the same messages, each as soon as the one before is on its way. A line of JSON in says
what (`Sends`), a line out the port; the process serves until its input ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc

from outrider.lab.gateway.loads import Door

HOST = "127.0.0.1"
BACKLOG = 4096
SERVICE = "outrider.v1.Inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sends:
    """What a floor answers to every request."""

    door: Door
    pieces: list[bytes]
    step_s: float  # between two pieces, over HTTP

    def to_json(self) -> str:
        pieces = [base64.b64encode(piece).decode() for piece in self.pieces]
        return json.dumps({**dataclasses.asdict(self), "pieces": pieces})

    @classmethod
    def from_json(cls, line: str) -> Sends:
        values = json.loads(line)
        pieces = [base64.b64decode(piece) for piece in values["pieces"]]
        return cls(door=Door(values["door"]), pieces=pieces, step_s=values["step_s"])


class Steps:
    """Writes the next piece to all who run, and pauses."""

    def __init__(self, sends: Sends) -> None:
        self._pieces, self._step_s = sends.pieces, sends.step_s
        self._running: dict[Connection, int] = {}  # and how many pieces each has
        self._task: asyncio.Task[None] | None = None

    def add(self, connection: Connection) -> None:
        self._running[connection] = 0
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    def remove(self, connection: Connection) -> None:
        self._running.pop(connection, None)

    async def _run(self) -> None:
        while self._running:
            for connection, place in list(self._running.items()):
                connection.write(self._pieces[place])
                if place + 1 < len(self._pieces):
                    self._running[connection] = place + 1
                else:
                    del self._running[connection]
                    connection.end()
            await asyncio.sleep(self._step_s)
        self._task = None


class Connection(asyncio.Protocol):
    """One client's: requests in, which are read no further than to their ends."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._received = b""
        self._closes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        size = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0] or 0)
        if end and len(body) >= size:
            self._received = body[size:]
            self._closes = b"Connection: close" in head
            self._steps.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._steps.remove(self)

    def write(self, piece: bytes) -> None:
        self._transport.write(piece)

    def end(self) -> None:
        if self._closes:
            self._transport.close()


@contextlib.asynccontextmanager
async def http_floor(sends: Sends) -> AsyncIterator[int]:
    """Serve over HTTP; yields the port."""
    steps = Steps(sends)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(steps), HOST, 0, backlog=BACKLOG)
    async with server:
        yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def grpc_floor(sends: Sends) -> AsyncIterator[int]:
    """Serve over gRPC, streams and single answers; yields the port."""

    async def generate(request: bytes, context: object) -> AsyncIterator[bytes]:
        for piece in sends.pieces:
            yield piece

    async def generate_unary(request: bytes, context: object) -> bytes:
        return sends.pieces[0]

    server = grpc.aio.server()
    handlers = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "GenerateUnary": grpc.unary_unary_rpc_method_handler(generate_unary),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


async def _serve(sends: Sends) -> None:
    async with (http_floor if sends.door is Door.HTTP else grpc_floor)(sends) as port:
        sys.stdout.write(f"{port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(Sends.from_json(sys.stdin.readline())))
