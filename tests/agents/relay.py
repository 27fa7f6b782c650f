"""A relay between a client and a server: both see what they would, and what passed is kept."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP = {"connection", "transfer-encoding", "keep-alive", "content-length"}
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Exchange:
    """One request, and its answer as far as it has come."""

    method: str
    path: str
    body: bytes
    status: int = 0
    content_type: str = ""
    pieces: list[bytes] = field(default_factory=list)  # of the answer's body, as they arrived

    @property
    def asked(self) -> dict[str, Any]:
        """The request's JSON; empty without one."""
        read = json.loads(self.body) if self.body else {}
        return read if isinstance(read, dict) else {}

    @property
    def num_events(self) -> int:
        """How many events a streamed answer has."""
        is_stream = self.content_type.startswith("text/event-stream")
        return sum(line.startswith(b"data:") for line in self.answer.split(b"\n")) if is_stream else 0

    @property
    def answer(self) -> bytes:
        return b"".join(self.pieces)


class Relay:
    """What has passed, in the order of the requests."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self._target = urlsplit(target)
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                relay.forward(self)

            do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = _pass

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def generations(self) -> list[Exchange]:
        """Return the requests that ask for an answer of the model."""
        return [exchange for exchange in self.exchanges if exchange.method == "POST" and "messages" in exchange.path
                or exchange.path.endswith(("/chat/completions", "/responses"))]

    @contextlib.contextmanager
    def running(self) -> Iterator[Relay]:
        thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def forward(self, handler: BaseHTTPRequestHandler) -> None:
        """Pass a request on, and its answer back piece by piece."""
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        exchange = Exchange(method=handler.command, path=handler.path, body=body)
        self.exchanges.append(exchange)
        assert self._target.hostname is not None
        link = http.client.HTTPConnection(self._target.hostname, self._target.port, timeout=TIMEOUT_S)
        headers = {name: value for name, value in handler.headers.items() if name.lower() not in {*_HOP, "host"}}
        with contextlib.closing(link):
            link.request(handler.command, handler.path, body, headers)
            answer = link.getresponse()
            exchange.status, exchange.content_type = answer.status, answer.getheader("content-type", "")
            handler.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in _HOP:
                    handler.send_header(name, value)
            handler.send_header("connection", "close")
            handler.end_headers()
            handler.close_connection = True
            while piece := answer.read1(1 << 16):
                exchange.pieces.append(piece)
                handler.wfile.write(piece)
                handler.wfile.flush()
