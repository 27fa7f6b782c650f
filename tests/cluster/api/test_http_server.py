"""The gateway's own HTTP server, spoken to over real sockets, with TLS and without."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.cluster.api.http_connection import MAX_HEADER_BYTES, BoundedProtocol
from outrider.cluster.api.http_server import KEEP_ALIVE_TIMEOUT_S, HttpServer
from outrider.cluster.common.security import TlsConfig
from services.certificates import Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@dataclass(frozen=True, slots=True)
class Door:
    """How a server listens, and how its clients connect."""

    tls: TlsConfig | None
    context: ssl.SSLContext | None

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=self.context or False)

    async def get(self, url: str, **kwargs: Any) -> httpx.Response:
        async with self.client() as client:
            return await client.get(url, **kwargs)

    async def connect(self, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", port, ssl=self.context)


@pytest.fixture(params=["plain", "tls"])
def door(request: pytest.FixtureRequest, certificates: Certificates) -> Door:
    if request.param == "plain":
        return Door(tls=None, context=None)
    return Door(certificates.tls(mutual=False), certificates.client_context())


class SlowApp:
    """Sends "first", then waits to be released before it sends "last"."""

    def __init__(self) -> None:
        self.released = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await self.released.wait()
        await send({"type": "http.response.body", "body": b"last", "more_body": False})


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode()})


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, tls: TlsConfig | None, host: str = "127.0.0.1", **limits: Any
) -> AsyncIterator[tuple[HttpServer, str]]:
    server = HttpServer(app, host, 0, tls, **limits)
    task = asyncio.create_task(server.run())
    try:
        yield server, f"{'http' if tls is None else 'https'}://127.0.0.1:{server.port}"
    finally:
        await server.drain(0.0)
        await task


async def get(url: str, context: ssl.SSLContext) -> httpx.Response:
    return await Door(tls=None, context=context).get(url)


class Hasty(BoundedProtocol):
    headers_timeout_s = 0.3


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["at first", "after a request"])
@pytest.mark.parametrize(
    "said", [b"", b"\r\n", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "an empty line", "half of the headers"]
)
async def test_a_connection_whose_headers_do_not_come_gives_up_its_place(door: Door, before: bytes, said: bytes):
    limits = {"max_connections": 2, "keep_alive_timeout_s": 1.0, "protocol": Hasty}
    async with serving(hello, door.tls, **limits) as (server, url):
        reader, writer = await door.connect(server.port)
        if before:
            writer.write(before)
            assert await reader.readuntil(b"http")
        writer.write(said)
        assert (await door.get(url)).status_code == 503
        async with asyncio.timeout(10):  # without a time-out of its own the server waits for ever
            with contextlib.suppress(ConnectionError):
                await reader.read()
        assert (await door.get(url)).status_code == 200
        writer.close()


async def test_an_idle_connection_outlasts_those_of_load_balancers(door: Door):
    """It is not closed by the headers' time-out either, which is shorter and begins with a request's first byte."""
    assert KEEP_ALIVE_TIMEOUT_S > 60.0
    for keep_alive_timeout_s, wait_s, is_kept in ((KEEP_ALIVE_TIMEOUT_S, 0.6, True), (1.0, 5.0, False)):
        limits = {"keep_alive_timeout_s": keep_alive_timeout_s, "protocol": Hasty}
        async with serving(hello, door.tls, **limits) as (server, _):
            reader, writer = await door.connect(server.port)
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                assert await reader.readuntil(b"http")
                await reader.readuntil(b"0\r\n\r\n")
            closing = asyncio.create_task(reader.read())
            await asyncio.wait([closing], timeout=wait_s)
            assert closing.done() is not is_kept
            writer.close()
            closing.cancel()


async def test_the_address_of_all_is_for_both_families(door: Door):
    async with serving(hello, door.tls, host="::") as (server, _):
        for address in ("127.0.0.1", "::1"):
            reader, writer = await asyncio.open_connection(
                address, server.port, ssl=door.context, server_hostname=door.context and "127.0.0.1"
            )
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await reader.readuntil(b"http")
            writer.close()


async def test_a_request_may_take_longer_than_its_headers(door: Door):
    app = SlowApp()
    async with serving(app, door.tls, protocol=Hasty) as (_, url):
        answer = asyncio.create_task(door.get(url))
        await asyncio.sleep(2 * Hasty.headers_timeout_s)
        app.released.set()
        assert (await answer).text == "firstlast"


async def test_tls_serves_those_who_trust_it(certificates: Certificates):
    async with serving(hello, certificates.tls(mutual=False)) as (server, url):
        assert (await get(url, certificates.client_context())).text == "https"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await get(url, certificates.client_context(ca_certs=certificates.other_ca_certs))
        with pytest.raises(httpx.RemoteProtocolError):
            await get(f"http://127.0.0.1:{server.port}", certificates.client_context())


async def test_mutual_tls_serves_only_known_certificates(certificates: Certificates):
    async with serving(hello, certificates.tls(mutual=True)) as (_, url):
        assert (await get(url, certificates.client_context(certificates.client))).text == "https"
        for stranger in (None, certificates.strange, certificates.expired):
            with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
                await get(url, certificates.client_context(stranger))
        assert (await get(url, certificates.client_context(certificates.client))).text == "https"


async def test_old_tls_is_refused(certificates: Certificates):
    context = certificates.client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with serving(hello, certificates.tls(mutual=False)) as (_, url):
        with pytest.raises(httpx.ConnectError):
            await get(url, context)


async def test_a_stream_arrives_as_it_is_sent(door: Door):
    app = SlowApp()
    async with (
        asyncio.timeout(10),
        serving(app, door.tls) as (_, url),
        door.client() as client,
        client.stream("GET", url) as response,
    ):
        pieces = response.aiter_text()
        assert await anext(pieces) == "first", "it waits for its release before the rest"
        app.released.set()
        assert await anext(pieces) == "last"


async def test_a_client_that_leaves_is_seen_at_once(door: Door):
    """While nothing is sent to it: what frees a request's place and KV waits for this message."""
    left = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass
        left.set()

    async with serving(app, door.tls) as (server, _):
        reader, writer = await door.connect(server.port)
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"first")
        assert not left.is_set()
        writer.transport.abort()
        async with asyncio.timeout(0.5):
            await left.wait()


async def test_a_client_that_does_not_read_stops_its_own_answer_alone(door: Door):
    """The server holds little of what it is not read, and others are answered meanwhile."""
    num_sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_sent
        if scope["path"] != "/endless":
            return await hello(scope, receive, send)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
            num_sent += 1
            await asyncio.sleep(0)

    async with serving(app, door.tls) as (server, url):
        _, writer = await door.connect(server.port)
        writer.transport.pause_reading()
        writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        before = -1
        while num_sent != before:
            before = num_sent
            assert (await door.get(url)).text == door.scheme
            await asyncio.sleep(0.2)
        assert 0 < num_sent < 1024  # the kernel's buffers take some megabytes
        writer.transport.abort()


async def test_draining_finishes_what_runs_and_takes_nothing_new(door: Door):
    app = SlowApp()
    async with (
        asyncio.timeout(10),
        serving(app, door.tls) as (server, url),
        door.client() as client,
        client.stream("GET", url) as response,
    ):
        pieces = response.aiter_text()
        assert await anext(pieces) == "first"
        draining = asyncio.create_task(server.drain(10.0))
        await until_refused(server.port)
        assert not draining.done()
        app.released.set()
        assert await anext(pieces) == "last"
        await draining


async def until_refused(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:  # refused, or reset while it was accepted
            return
        writer.close()
        await asyncio.sleep(0.01)


async def test_a_drain_answers_whom_the_kernel_has_connected_already(door: Door):
    """No client learns of a gateway that another one has replaced: not from a connection that nobody has accepted yet,
    nor from one that it keeps open."""
    async with asyncio.timeout(10), serving(hello, door.tls) as (server, url), door.client() as client:
        assert "connection" not in (await client.get(url)).headers
        draining = asyncio.create_task(server.drain(10.0))
        connected = []
        with contextlib.suppress(ConnectionRefusedError):
            while True:  # the last one since the server's loop has looked at its port
                connected.append(socket.create_connection(("127.0.0.1", server.port)))
                time.sleep(0.03)
                await asyncio.sleep(0)
        answer = await client.get(url)
        assert (answer.text, answer.headers["connection"]) == (door.scheme, "close")
        answers = await asyncio.gather(*(ask(connection, door.context) for connection in connected))
        assert all(door.scheme.encode() in answer for answer in answers)
        await draining


async def ask(connected: socket.socket, context: ssl.SSLContext | None) -> bytes:
    name = None if context is None else "127.0.0.1"
    reader, writer = await asyncio.open_connection(sock=connected, ssl=context, server_hostname=name)
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await reader.read()  # until the server closes it
    writer.close()
    return answer


async def test_an_idle_connection_does_not_hold_a_drain_up(door: Door):
    async with asyncio.timeout(10), serving(hello, door.tls) as (server, url), door.client() as client:
        assert (await client.get(url)).text == door.scheme
        await server.drain(60.0)


async def test_what_outlasts_the_grace_is_cut_off(door: Door):
    async with (
        asyncio.timeout(10),
        serving(SlowApp(), door.tls) as (server, url),
        door.client() as client,
        client.stream("GET", url) as response,
    ):
        assert await anext(response.aiter_text()) == "first"
        await server.drain(0.5)


async def test_gateways_of_a_node_share_a_port_and_a_stranger_keeps_them_out(door: Door):
    asked = [0, 0]

    def counting(index: int) -> ASGIApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            asked[index] += 1
            await hello(scope, receive, send)

        return app

    async with serving(counting(0), door.tls) as (first, url):
        second = HttpServer(counting(1), "127.0.0.1", first.port, door.tls)
        task = asyncio.create_task(second.run())
        while not all(asked):  # the kernel chooses by the client's port
            assert (await door.get(url)).text == door.scheme
        await second.drain(0.0)
        await task
        assert (await door.get(url)).text == door.scheme
    with socket.create_server(("127.0.0.1", 0)) as stranger, pytest.raises(OSError, match="in use"):
        HttpServer(hello, "127.0.0.1", stranger.getsockname()[1], door.tls)


GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0"


async def test_headers_of_half_the_bound_are_taken(door: Door):
    async with serving(hello, door.tls) as (_, url):
        assert (await door.get(url, headers={"x": "a" * (MAX_HEADER_BYTES // 2)})).status_code == 200


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (b"GET /", b"a" * 1000),
        (GET, b"x: " + b"a" * 1000 + b"\r\n"),
        (GET + b"x: ", b"a" * 1000),
        (GET, b"a" * 1000),
        (CHUNKED + b"\r\n", b"x: " + b"a" * 1000 + b"\r\n"),
        (CHUNKED + b"\r\nx: ", b"a" * 1000),
        (CHUNKED + b";a", b"a" * 1000),
        (b"", b"\r\n" * 500),
    ],
    ids=["target", "headers", "value", "name", "trailers", "a trailer", "chunk extension", "empty lines"],
)
async def test_what_is_no_body_is_bounded(door: Door, begin: bytes, again: bytes):
    """However it is cut: the server closes before it has taken much more than the bound."""
    app = SlowApp()  # which is not done with a request that has begun
    async with serving(app, door.tls) as (server, _):
        reader, writer = await door.connect(server.port)
        writer.write(begin)
        num_written = 0
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof() and num_written < 64 * MAX_HEADER_BYTES:
                writer.write(again)
                await writer.drain()
                await asyncio.sleep(0)
                num_written += len(again)
        assert num_written < 8 * MAX_HEADER_BYTES  # what lies in between included
        writer.transport.abort()


async def test_an_offer_of_another_protocol_is_passed_over(door: Door):
    """As Java's client makes it of HTTP/2, with its first request."""

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        body, more_body = b"", True
        while more_body:
            message = await receive()
            body, more_body = body + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAEAAEAAAAIAAAABAAMAAABk"}
    async with serving(echo, door.tls) as (_, url), door.client() as client:
        for body in ("first", "second\r\nUpgrade: of the body\r\n\r\n"):
            assert (await client.post(url, content=body, headers=offer)).text == body


async def test_connections_beyond_the_limit_are_told_so(door: Door):
    app = SlowApp()
    async with (
        serving(app, door.tls, max_connections=2) as (_, url),
        door.client() as client,
        client.stream("GET", url) as response,
    ):
        assert response.status_code == 200
        assert (await door.get(url)).status_code == 503
        app.released.set()


async def test_unusable_files_keep_the_server_from_starting(certificates: Certificates):
    tls = TlsConfig(option="ssl", certfile=certificates.server.certfile, keyfile=certificates.client.keyfile)
    with pytest.raises(ValueError, match="ssl_certfile, ssl_keyfile"):
        HttpServer(hello, "127.0.0.1", 0, tls)
