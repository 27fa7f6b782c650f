"""The gateway's own HTTP server, for TLS: Serve's proxy cannot verify clients."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider.cluster.common.security import TlsConfig

MAX_HEADER_BYTES = 64 << 10
MAX_CONNECTIONS = 4096  # more are answered 503
HEADERS_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.05


class PunctualProtocol(H11Protocol):
    """Close connections whose next request's headers do not come in time: each holds one of `MAX_CONNECTIONS`.

    Between two requests uvicorn's own keep-alive time-out is shorter, until the first byte comes.
    """

    headers_timeout_s = HEADERS_TIMEOUT_S
    _overdue: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._overdue is None:
            self._overdue = self.loop.call_later(self.headers_timeout_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process that hosts the replica."""
        yield


class HttpsServer:
    """An ASGI app behind TLS, on the running event loop.

    The port is bound at once, shared with the other gateways of the node; raises `OSError` when a stranger holds it
    and `ValueError` as `TlsConfig.check`. `port` is the one that was bound, of interest when port 0 was asked for.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: TlsConfig,
        *,
        max_connections: int = MAX_CONNECTIONS,
        protocol: type[asyncio.Protocol] = PunctualProtocol,
    ) -> None:
        tls.check()
        config = uvicorn.Config(
            app,
            http=protocol,  # over h11, the one parser whose headers are bounded
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            limit_concurrency=max_connections,
            ssl_certfile=tls.certfile,
            ssl_keyfile=tls.keyfile,
            ssl_ca_certs=tls.ca_certs,
            ssl_cert_reqs=ssl.CERT_NONE if tls.ca_certs is None else ssl.CERT_REQUIRED,
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
        )
        self._server = _Server(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, reuse_port=True)
        self.port: int = self._socket.getsockname()[1]
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until `drain`."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._ended.set()

    async def drain(self, grace_s: float) -> None:
        """Take no new connection, give running answers `grace_s`, then cut them off."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        while not self._ended.is_set():
            await asyncio.sleep(POLL_INTERVAL_S)
            is_listening = self._socket.fileno() >= 0
            if not is_listening and not self._server.server_state.tasks:
                self._abort_idle_connections()

    def _abort_idle_connections(self) -> None:
        """End connections with nothing left to send: a client that is slow to answer TLS's goodbye holds nobody up."""
        for connection in list(self._server.server_state.connections):
            if connection.transport.get_write_buffer_size() == 0:
                connection.transport.abort()
