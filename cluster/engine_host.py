"""What verifier and drafter replicas share: an engine in processes of its own, and everything that must end with it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from outrider.cluster.background import BackgroundTasks
from outrider.cluster.engine_shell import EngineShell
from outrider.cluster.rank_actors import RankActors
from outrider.verifier_service.link_messages import CHANNEL_OPTIONS

ENGINE_SILENCE_S = 30.0  # engines report several times a second; one silent for longer than any step hangs
SERVER_GRACE_S = 0.5


class EngineHost:
    """One engine behind a Serve replica: its ranks, its pipe, its gRPC port, its background tasks."""

    def __init__(self, *, on_message: Callable[[Any], None], on_failure: Callable[[str], None]) -> None:
        """`on_message` hears every frame after the first; `on_failure` hears once why there is no engine any more."""
        self.tasks = BackgroundTasks()
        self._on_message = on_message
        self._on_failure = on_failure
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._last_frame_s = time.monotonic()
        self._exit = contextlib.AsyncExitStack()
        self._ranks: RankActors | None = None
        self._shell: EngineShell | None = None

    async def start(self, ranks: RankActors, message_types: Sequence[type]) -> Any:
        """Wait until the engine is loaded; return its first message."""
        self._ranks = ranks
        self._exit.callback(ranks.stop)
        pipe = await ranks.connect()
        self._shell = EngineShell(pipe, message_types, on_message=self._hear, on_failure=self._fail)
        self._exit.callback(self._shell.close)
        self._shell.start()
        return await self._ready

    async def serve(self, host: str, register: Callable[[grpc.aio.Server], None]) -> str:
        """Open a gRPC port of its own; return its "host:port"."""
        server = grpc.aio.server(options=CHANNEL_OPTIONS)
        register(server)
        port = server.add_insecure_port(f"{host}:0")
        await server.start()
        self._exit.push_async_callback(server.stop, SERVER_GRACE_S)
        return f"{host}:{port}"

    def send(self, message: Any) -> None:
        """Hand a message to the engine; raises `ConnectionError` once it is gone."""
        if self._shell is None:
            raise ConnectionError("the engine has not started")
        self._shell.send(message)

    @property
    def failure(self) -> str | None:
        """Return why the engine can no longer be used, None while it can."""
        if self._shell is None:
            return "the engine has not started"
        if self._shell.failure is not None:
            return self._shell.failure
        silence_s = time.monotonic() - self._last_frame_s
        return f"the engine has been silent for {silence_s:.0f} s" if silence_s > ENGINE_SILENCE_S else None

    def check(self) -> None:
        """Raise `RuntimeError` when the engine, a rank or a background task is gone."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        if self._ranks is None or self._ranks.ended():
            raise RuntimeError("a rank has ended")
        self.tasks.check()

    async def rank_pids(self) -> list[int]:
        """Return the processes of the ranks, rank 0 first."""
        return [] if self._ranks is None else await self._ranks.pids()

    async def close(self) -> None:
        await self.tasks.stop()
        await self._exit.aclose()

    def _hear(self, message: Any) -> None:
        self._last_frame_s = time.monotonic()
        if self._ready.done():
            self._on_message(message)
        else:
            self._ready.set_result(message)

    def _fail(self, reason: str) -> None:
        if self._ready.done():
            self._on_failure(reason)
        else:
            self._ready.set_exception(ConnectionError(reason))
