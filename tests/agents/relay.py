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
_GENERATING = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Exchange:
    """One request, and its answer as far as it has come."""

    path: str
    body: bytes
    status: int = 0
    content_type: str = ""
    answer: bytes = b""

    @property
    def asked(self) -> dict[str, Any]:
        """The request's JSON."""
        read: dict[str, Any] = json.loads(self.body)
        return read

    @property
    def num_events(self) -> int:
        """How many events a streamed answer has."""
        is_stream = self.content_type.startswith("text/event-stream")
        return sum(line.startswith(b"data:") for line in self.answer.split(b"\n")) if is_stream else 0


@dataclass(slots=True)
class Relay:
    """What has passed of generations, in the order of the requests."""

    target: str
    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[Relay]:
        """Pass on what comes to `url`."""
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _pass(self) -> None:
                relay._forward(self)

            do_GET = do_POST = do_HEAD = _pass

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _forward(self, handler: BaseHTTPRequestHandler) -> None:
        """Pass a request on, and its answer back piece by piece."""
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        exchange = Exchange(path=handler.path.partition("?")[0], body=body)
        if handler.command == "POST" and exchange.path in _GENERATING:
            self.exchanges.append(exchange)
        target = urlsplit(self.target)
        assert target.hostname is not None
        link = http.client.HTTPConnection(target.hostname, target.port, timeout=TIMEOUT_S)
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
                exchange.answer += piece
                handler.wfile.write(piece)
                handler.wfile.flush()
