"""A TCP proxy on a thread of its own whose link can be cut, or left open while every byte is lost."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class TcpProxy:
    """Forward every connection to one target, until told otherwise."""

    def __init__(self, target: str) -> None:
        host, port = target.rsplit(":", 1)
        self._target = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tcp-proxy", daemon=True)
        self._is_cut = False
        self._flows = asyncio.Event()  # bytes are forwarded while it is set
        self._flows.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._thread.start()
        self.address = self._run(self._start())

    def cut(self) -> None:
        """Reset every connection and every new one."""
        self._run(self._cut())

    def lose_packets(self) -> None:
        """Leave every connection open and forward nothing: to both ends the other has fallen silent."""
        self._run(self._lose_packets())

    def heal(self) -> None:
        """Forward again; connections whose bytes were lost are reset, for their ends disagree by now."""
        self._run(self._heal())

    def close(self) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _start(self) -> str:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    async def _cut(self) -> None:
        self._is_cut = True
        self._reset_all()

    async def _lose_packets(self) -> None:
        self._flows.clear()

    async def _heal(self) -> None:
        if not self._flows.is_set():
            self._reset_all()
        self._is_cut = False
        self._flows.set()

    async def _close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._reset_all()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _reset_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._target)
        writers = {writer, upstream_writer}
        self._writers |= writers
        try:
            await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))
        finally:
            self._writers -= writers
            for end in writers:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):  # either end may leave
            while data := await reader.read(1 << 16):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
