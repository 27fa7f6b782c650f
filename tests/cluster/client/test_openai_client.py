"""The client of OpenAI-compatible servers: every way in which an answer can go wrong is an error with a text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.cluster.client.openai_client import Server, ServerError, first_model, open_client, stream_events

Handler = Callable[[httpx.Request], httpx.Response]


def answers(status: int = 200, **content: Any) -> Handler:
    return lambda _: httpx.Response(status, **content)


async def events(handler: Handler) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server") as client:
        return [event async for event in stream_events(client, "/v1/completions", {"prompt": "x"})]


async def model(handler: Handler) -> str:
    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://server") as client:
        return await first_model(client)


async def test_events_are_read_up_to_done_and_other_lines_skipped():
    text = ': keep-alive\n\ndata: {"a": 1}\n\nevent: x\ndata:{"a": 2}\n\ndata: [DONE]\n\ndata: {"a": 3}\n\n'
    assert await events(answers(text=text)) == [{"a": 1}, {"a": 2}]
    assert await events(answers(text=text.replace("\n", "\r\n"))) == [{"a": 1}, {"a": 2}]


async def test_lines_end_where_the_standard_says_and_not_within_a_text():
    async def pieces() -> AsyncIterator[bytes]:
        body = 'data: {"a": "x\u2028\u2029\x85日y"}\r\n\r\ndata: [DONE]\r\n\r\n'.encode()
        for byte in body:
            yield bytes([byte])

    assert await events(lambda _: httpx.Response(200, content=pieces())) == [{"a": "x\u2028\u2029\x85日y"}]


@pytest.mark.parametrize(
    ("handler", "message", "status"),
    [
        (answers(text='data: {"a": 1}\n\n'), "ended before", None),
        (answers(text="data: {broken\n\n"), "not JSON: {broken", None),
        (answers(text="data: [1]\n\n"), "no object", None),
        (answers(text='data: {"error": {"message": "lost"}}\n\n'), "^lost$", None),
        (answers(text='data: {"error": {"code": 7}}\n\n'), '"code": 7', None),
        (answers(429, json={"error": {"message": "slow down"}}), "HTTP 429: slow down", 429),
        (answers(400, json={"error": "as text"}), "HTTP 400: as text", 400),
        (answers(502, text="bad gateway"), "HTTP 502: bad gateway", 502),
        (answers(503), "HTTP 503: Service Unavailable", 503),
    ],
)
async def test_what_goes_wrong_is_an_error_that_says_so(handler: Handler, message: str, status: int | None):
    with pytest.raises(ServerError, match=message) as error:
        await events(handler)
    assert error.value.status == status


async def test_a_broken_connection_is_an_error():
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadError("peer went away")

    with pytest.raises(ServerError, match="ReadError: peer went away"):
        await events(broken)


async def test_the_first_model_is_found_and_a_strange_list_refused():
    assert await model(answers(json={"data": [{"id": "a"}, {"id": "b"}]})) == "a"
    for strange in (answers(json={"data": []}), answers(text="hello")):
        with pytest.raises(ServerError, match="not a list of models"):
            await model(strange)
    with pytest.raises(ServerError, match="HTTP 401"):
        await model(answers(401))


@pytest.mark.parametrize("url", ["http://server:1", "http://server:1/", "http://server:1/v1", "http://server:1/v1/"])
async def test_the_url_may_end_in_v1_and_the_key_is_sent(url: str):
    async with open_client(Server(url=url, api_key="secret")) as client:
        request = client.build_request("GET", "/v1/models")
    assert str(request.url) == "http://server:1/v1/models"
    assert request.headers["Authorization"] == "Bearer secret"


def test_files_that_are_no_certificates_are_refused(tmp_path: Path):
    file = tmp_path / "x.pem"
    file.write_text("x")
    with pytest.raises(ValueError, match="ssl_ca_certs"):
        open_client(Server(url="https://server", ssl_ca_certs=file))
