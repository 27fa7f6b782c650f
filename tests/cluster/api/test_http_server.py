"""The gateway's own HTTPS server, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.cluster.api.http_server import MAX_HEADER_BYTES, HttpsServer, PunctualProtocol
from outrider.cluster.common.security import TlsConfig
from services.certificates import Certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


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
async def serving(app: ASGIApp, tls: TlsConfig, **limits: Any) -> AsyncIterator[tuple[HttpsServer, str]]:
    server = HttpsServer(app, "127.0.0.1", 0, tls, **limits)
    task = asyncio.create_task(server.run())
    try:
        yield server, f"https://127.0.0.1:{server.port}"
    finally:
        await server.drain(0.0)
        await task


async def get(url: str, context: ssl.SSLContext, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(verify=context) as client:
        return await client.get(url, **kwargs)


class Hasty(PunctualProtocol):
    headers_timeout_s = 0.3


@pytest.mark.parametrize("before", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], ids=["at first", "after a request"])
@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half of the headers"])
async def test_a_connection_whose_headers_do_not_come_gives_up_its_place(
    certificates: Certificates, before: bytes, said: bytes
):
    context = certificates.client_context()
    async with serving(hello, certificates.tls(mutual=False), max_connections=2, protocol=Hasty) as (server, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
        if before:
            writer.write(before)
            assert await reader.readuntil(b"https")
        writer.write(said)
        assert (await get(url, context)).status_code == 503
        async with asyncio.timeout(10):  # without a time-out of its own the server waits for ever
            with contextlib.suppress(ConnectionError):
                await reader.read()
        assert (await get(url, context)).status_code == 200
        writer.close()


async def test_a_request_may_take_longer_than_its_headers(certificates: Certificates):
    app, context = SlowApp(), certificates.client_context()
    async with serving(app, certificates.tls(mutual=False), protocol=Hasty) as (_, url):
        answer = asyncio.create_task(get(url, context))
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


async def test_a_stream_arrives_as_it_is_sent(certificates: Certificates):
    app = SlowApp()
    async with (
        asyncio.timeout(10),
        serving(app, certificates.tls(mutual=True)) as (_, url),
        httpx.AsyncClient(verify=certificates.client_context(certificates.client)) as client,
        client.stream("GET", url) as response,
    ):
        pieces = response.aiter_text()
        assert await anext(pieces) == "first", "it waits for its release before the rest"
        app.released.set()
        assert await anext(pieces) == "last"


async def test_draining_finishes_what_runs_and_takes_nothing_new(certificates: Certificates):
    app = SlowApp()
    async with (
        asyncio.timeout(10),
        serving(app, certificates.tls(mutual=False)) as (server, url),
        httpx.AsyncClient(verify=certificates.client_context()) as client,
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


async def test_an_idle_connection_does_not_hold_a_drain_up(certificates: Certificates):
    async with (
        asyncio.timeout(10),
        serving(hello, certificates.tls(mutual=False)) as (server, url),
        httpx.AsyncClient(verify=certificates.client_context()) as client,
    ):
        assert (await client.get(url)).text == "https"
        await server.drain(60.0)


async def test_what_outlasts_the_grace_is_cut_off(certificates: Certificates):
    async with (
        asyncio.timeout(10),
        serving(SlowApp(), certificates.tls(mutual=False)) as (server, url),
        httpx.AsyncClient(verify=certificates.client_context()) as client,
        client.stream("GET", url) as response,
    ):
        assert await anext(response.aiter_text()) == "first"
        await server.drain(0.5)


async def test_gateways_of_a_node_share_a_port_and_a_stranger_keeps_them_out(certificates: Certificates):
    tls = certificates.tls(mutual=False)
    async with serving(hello, tls) as (first, url):
        second = HttpsServer(hello, "127.0.0.1", first.port, tls)
        task = asyncio.create_task(second.run())
        await second.drain(0.0)
        await task
        assert (await get(url, certificates.client_context())).text == "https"
    with socket.create_server(("127.0.0.1", 0)) as stranger, pytest.raises(OSError, match="in use"):
        HttpsServer(hello, "127.0.0.1", stranger.getsockname()[1], tls)


async def test_headers_are_bounded(certificates: Certificates):
    async with serving(hello, certificates.tls(mutual=False)) as (_, url):
        context = certificates.client_context()
        assert (await get(url, context, headers={"x": "a" * (MAX_HEADER_BYTES // 2)})).status_code == 200
        with contextlib.suppress(httpx.RemoteProtocolError, httpx.WriteError, httpx.ReadError):
            answer = await get(url, context, headers={"x": "a" * (4 * MAX_HEADER_BYTES)})
            assert answer.status_code == 400


async def test_connections_beyond_the_limit_are_told_so(certificates: Certificates):
    app = SlowApp()
    async with serving(app, certificates.tls(mutual=False), max_connections=2) as (_, url):
        context = certificates.client_context()
        async with httpx.AsyncClient(verify=context) as client, client.stream("GET", url) as response:
            assert response.status_code == 200
            assert (await get(url, context)).status_code == 503
            app.released.set()


async def test_unusable_files_keep_the_server_from_starting(certificates: Certificates):
    tls = TlsConfig(option="ssl", certfile=certificates.server.certfile, keyfile=certificates.client.keyfile)
    with pytest.raises(ValueError, match="ssl_certfile, ssl_keyfile"):
        HttpsServer(hello, "127.0.0.1", 0, tls)
