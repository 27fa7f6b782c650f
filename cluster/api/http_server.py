"""The gateway's own HTTP server, plain or with TLS."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

from outrider.cluster.api.http_connection import BoundedProtocol
from outrider.cluster.common.security import TlsConfig

MAX_CONNECTIONS = 4096  # more are answered 503
POLL_INTERVAL_S = 0.05
KEEP_ALIVE_TIMEOUT_S = 75.0  # load balancers keep idle connections for 60 s, and would send into one that we close
LINGER_S = 0.5  # for handshakes, and requests on open connections, that are under way when a drain begins


class _Server(uvicorn.Server):
    """uvicorn's server, within a replica, and closed so that no client is turned away that another would have taken."""

    has_lingered = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process that hosts the replica."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take whom the kernel has connected, close the port, and answer those who ask at once for the last time."""
        taken = [self._take(connection) for listener in sockets or () for connection in _waiting(listener)]
        for server in self.servers:
            server.close()
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE_HEADER]
        await asyncio.sleep(min(LINGER_S, self.config.timeout_graceful_shutdown or 0.0))
        self.has_lingered = True
        for connecting in taken:
            connecting.cancel()  # its TLS handshake has not ended
        await asyncio.gather(*taken, return_exceptions=True)
        await super().shutdown(sockets)

    def _take(self, connection: socket.socket) -> asyncio.Task[Any]:
        def protocol() -> asyncio.BaseProtocol:
            kind: Any = self.config.http_protocol_class
            return kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        loop = asyncio.get_running_loop()
        return loop.create_task(loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl))


def _waiting(listener: socket.socket) -> Iterator[socket.socket]:
    """Yield the connections that a client has made and nobody has accepted: to close the port would reset them."""
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            yield listener.accept()[0]


class HttpServer:
    """An ASGI app over HTTP, with TLS or without, on the running event loop.

    The constructor binds the port, which the gateways of a node share; on host "::" for IPv4 as well. It raises
    `OSError` if another program holds the port, and `ValueError` as `TlsConfig.check`. `port` is the bound port,
    also if port 0 was requested.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        tls: TlsConfig | None,
        *,
        max_connections: int = MAX_CONNECTIONS,
        keep_alive_timeout_s: float = KEEP_ALIVE_TIMEOUT_S,
        protocol: type[asyncio.Protocol] = BoundedProtocol,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=protocol,
            limit_concurrency=max_connections,
            timeout_keep_alive=math.ceil(keep_alive_timeout_s),
            ws="none",
            lifespan="off",
            proxy_headers=False,
            server_header=False,
            access_log=False,
            log_config=None,
            **({} if tls is None else _files_of(tls)),
        )
        self._server = _Server(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, reuse_port=True, dualstack_ipv6=host == "::")
        self.port: int = self._socket.getsockname()[1]
        self._ended = asyncio.Event()

    async def run(self) -> None:
        """Serve until `drain`."""
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            self._ended.set()

    async def drain(self, grace_s: float) -> None:
        """Accept no new connection, give running answers `grace_s`, then abort them."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace_s)
        self._server.should_exit = True
        while not self._ended.is_set():
            await asyncio.sleep(POLL_INTERVAL_S)
            if self._server.has_lingered and not self._server.server_state.tasks:
                self._abort_idle_connections()

    def _abort_idle_connections(self) -> None:
        """Abort connections with nothing left to send: a client slow to answer TLS's close must not delay the stop."""
        for connection in list(self._server.server_state.connections):
            if connection.transport.get_write_buffer_size() == 0:
                connection.transport.abort()


def _files_of(tls: TlsConfig) -> dict[str, Any]:
    """Return uvicorn's options of TLS; raises `ValueError` as `TlsConfig.check`."""
    tls.check()
    return {
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_ca_certs": tls.ca_certs,
        "ssl_cert_reqs": ssl.CERT_NONE if tls.ca_certs is None else ssl.CERT_REQUIRED,
    }
