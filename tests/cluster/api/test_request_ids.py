from __future__ import annotations

import grpc
import pytest
from httpx import ASGITransport, AsyncClient, Response
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from outrider.cluster.api.request_ids import RequestIdInterceptor, RequestIdMiddleware
from outrider.cluster.common.logs import request_id


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer the ids that a handler sees: in the logs and in its headers."""
    ids = [request_id.get(), *Request(scope).headers.getlist("x-request-id")]
    await JSONResponse(ids)(scope, receive, send)


async def ask(*given: bytes, is_echoed_by_proxy: bool = False) -> Response:
    transport = ASGITransport(RequestIdMiddleware(app, is_echoed_by_proxy=is_echoed_by_proxy))
    async with AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.get("/", headers=[(b"X-Request-Id", id_) for id_ in given])


async def test_a_clients_id_is_that_of_the_logs_and_of_the_answer():
    answer = await ask(b"mine")
    assert answer.json() == ["mine", "mine"]
    assert answer.headers.get_list("x-request-id") == ["mine"]
    assert request_id.get() is None, "the next request has its own"


@pytest.mark.parametrize("given", [(), (b"",), (b"x" * 129,), (b"a\tb",), (b"caf\xc3\xa9",)])
async def test_a_missing_or_unsafe_id_is_replaced_by_one_that_all_share(given: tuple[bytes, ...]):
    answer = await ask(*given)
    logged, *headers = answer.json()
    assert headers == answer.headers.get_list("x-request-id") == [logged]
    assert len(logged) == 32


async def test_what_a_proxy_echoes_is_not_echoed_twice():
    answer = await ask(b"mine", is_echoed_by_proxy=True)
    assert answer.json() == ["mine", "mine"]
    assert "x-request-id" not in answer.headers


async def test_a_grpc_call_has_an_id():
    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return (request_id.get() or "").encode()

    server = grpc.aio.server(interceptors=[RequestIdInterceptor()])
    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/test.Service/Ask")
        assert await ask(b"", metadata=(("x-request-id", "mine"),)) == b"mine"
        assert len(await ask(b"")) == 32
    await server.stop(None)
