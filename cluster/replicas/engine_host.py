"""An engine behind a verifier or drafter replica: its processes, and everything that must end with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from outrider.cluster.api.malformed_calls import MalformedCallInterceptor
from outrider.cluster.common.background import BackgroundTasks
from outrider.cluster.common.security import LinkTls, bind
from outrider.cluster.replicas.engine_shell import EngineShell
from outrider.cluster.replicas.rank_actors import RankActors
from outrider.verifier_service.messages.link import CHANNEL_OPTIONS

NUM_LISTENS = 10  # short waits that make up the time-out
SERVER_GRACE_S = 0.5


async def open_port(
    host: str, register: Callable[[grpc.aio.Server], None], links: LinkTls, port: int = 0
) -> tuple[grpc.aio.Server, str]:
    """Open a gRPC port for our own services, a free one for 0; return its server and "host:port".

    Plaintext without the links' TLS. `host` is as in URLs.
    """
    interceptors = (*links.server_interceptors, MalformedCallInterceptor())
    server = grpc.aio.server(interceptors=interceptors, options=CHANNEL_OPTIONS)
    register(server)
    port = bind(server, f"{host}:{port}", links.server_credentials)
    await server.start()
    return server, f"{host}:{port}"


class EngineHost:
    """One engine behind a Serve replica: its ranks, its pipe, its gRPC port, its background tasks."""

    def __init__(
        self,
        *,
        on_message: Callable[[Any], None],
        on_failure: Callable[[str], None],
        timeout_s: float,
    ) -> None:
        """`on_message` gets every frame after the first; `on_failure` gets the reason, once, if the engine fails.

        Engines report several times a second. An engine that is silent for `timeout_s`, longer than any step, fails.
        """
        self.tasks = BackgroundTasks()
        self._on_message = on_message
        self._on_failure = on_failure
        self._ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._timeout_s = timeout_s
        self._num_frames = 0
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
        ready = await self._ready
        self.tasks.start(self._give_up_when_silent(self._shell), "listen to the engine")
        return ready

    async def serve(
        self,
        host: str,
        register: Callable[[grpc.aio.Server], None],
        links: LinkTls | None = None,
    ) -> str:
        """Open a gRPC port, plaintext without the links' TLS; return its "host:port"."""
        server, endpoint = await open_port(host, register, links or LinkTls())
        self._exit.push_async_callback(server.stop, SERVER_GRACE_S)
        return endpoint

    def send(self, message: Any) -> None:
        """Send a message to the engine; raises `ConnectionError` once it is gone."""
        if self._shell is None:
            raise ConnectionError("the engine has not started")
        self._shell.send(message)

    @property
    def failure(self) -> str | None:
        """Why the engine has failed; None: it has not."""
        if self._shell is None:
            return "the engine has not started"
        return self._shell.failure

    def check(self) -> None:
        """Raise `RuntimeError` if the engine, a rank or a background task is gone."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        if self._ranks is None or self._ranks.ended():
            raise RuntimeError("a rank has ended")
        self.tasks.check()

    def on_close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Register a function that closes something before the engine is closed."""
        self._exit.push_async_callback(close)

    async def rank_pids(self) -> list[int]:
        """Return the pids of the ranks, rank 0 first."""
        return [] if self._ranks is None else await self._ranks.pids()

    async def close(self) -> None:
        await self.tasks.stop()
        await self._exit.aclose()

    async def _give_up_when_silent(self, shell: EngineShell) -> None:
        """Fail the engine once it has been silent for the time-out.

        The time is counted in short waits, not read from a clock: a pause of this process counts as one wait, and the
        frames that arrived meanwhile are read before the next.
        """
        num_silent = 0
        while num_silent < NUM_LISTENS:
            num_frames = self._num_frames
            await asyncio.sleep(self._timeout_s / NUM_LISTENS)
            num_silent = num_silent + 1 if self._num_frames == num_frames else 0
        shell.fail(f"the engine has been silent for {self._timeout_s:g} s")

    def _hear(self, message: Any) -> None:
        self._num_frames += 1
        if self._ready.done():
            self._on_message(message)
        else:
            self._ready.set_result(message)

    def _fail(self, reason: str) -> None:
        if self._ready.done():
            self._on_failure(reason)
        else:
            self._ready.set_exception(ConnectionError(reason))
