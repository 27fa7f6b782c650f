"""A client's connection to the HTTP server: parsed by httptools, whose headers it bounds in bytes and in time.

uvicorn bounds them with its other parser, h11, which takes 140 µs a small request and 8 an event of a stream where this
one takes 30 and 4.
"""

from __future__ import annotations

import asyncio
import re

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
HEADERS_TIMEOUT_S = 20.0
_UPGRADE = re.compile(rb"\r\nUpgrade:", re.IGNORECASE)


class _TooLarge(Exception):
    """Headers beyond the bound: the parser fails with it, and uvicorn answers 400."""


class BoundedProtocol(HttpToolsProtocol):
    """Refuse headers, or trailers, beyond `MAX_HEADER_BYTES`, and close a connection whose headers come too late.

    What is late takes one of the server's places. Between two requests, until the first byte, uvicorn's own keep-alive
    time-out applies.
    """

    headers_timeout_s = HEADERS_TIMEOUT_S
    _overdue: asyncio.TimerHandle | None = None
    _num_parsed = 0  # bytes of the present request's target and headers
    _num_unparsed = 0  # bytes since the parser last found something: at most one read more than it holds

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        self._num_unparsed += len(data)
        super().data_received(_without_offers(data) if self._is_owed_a_request else data)
        if self._num_unparsed > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("Headers too large.")
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_watching()

    def shutdown(self) -> None:
        if not self.transport.is_closing():  # closed twice, TLS of asyncio could be aborted no more
            super().shutdown()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_parsed = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._num_unparsed = 0

    def _count(self, num_bytes: int) -> None:
        self._num_unparsed = 0
        self._num_parsed += num_bytes
        if self._num_parsed > MAX_HEADER_BYTES:
            raise _TooLarge

    @property
    def _is_owed_a_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._is_owed_a_request:
            self._stop_watching()
        elif self._overdue is None:
            self._overdue = self.loop.call_later(self.headers_timeout_s, self.transport.abort)

    def _stop_watching(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None


def _without_offers(data: bytes) -> bytes:
    """Hide that a client would like another protocol, as Java's does with its first request: the parser would pass over
    the request's body. No byte more or less, or a body that holds such a line could become a request."""
    head, end, body = data.partition(b"\r\n\r\n")
    return b"".join((_UPGRADE.sub(b"\r\nIgnored:", head), end, body))
