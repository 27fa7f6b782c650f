"""A small client of OpenAI-compatible servers, for `outrider chat` and `outrider bench serve`."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 300.0  # between two events
MAX_ERROR_CHARS = 500
_LINE_END = re.compile(rb"\r\n|\r|\n")


class ServerError(RuntimeError):
    """The server was unreachable, answered an error or broke off; `status` is None without an HTTP answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server's address, key and certificates."""

    url: str
    api_key: str | None = None
    ssl_ca_certs: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    @property
    def base_url(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")


def open_client(server: Server) -> httpx.AsyncClient:
    """Return a client without a connection limit; raises `ValueError` for bad certificate files."""
    return httpx.AsyncClient(
        base_url=server.base_url,
        headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else {},
        verify=_ssl_context(server),
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=None),  # queueing in the client would be measured as the server's
        trust_env=False,  # a proxy would be measured too
    )


def _ssl_context(server: Server) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=server.ssl_ca_certs)
        if server.ssl_certfile is not None:
            context.load_cert_chain(server.ssl_certfile, server.ssl_keyfile)
    except ssl.SSLError as error:
        raise ValueError(f"ssl_ca_certs, ssl_certfile or ssl_keyfile is not usable: {error}") from error
    return context


async def first_model(client: httpx.AsyncClient) -> str:
    """Return the name of the first model that the server lists; raises `ServerError`."""
    with _server_errors():
        response = await client.get("/v1/models")
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        try:
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError("/v1/models is not a list of models: is this an OpenAI-compatible server?") from error


async def ask_json(client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Return the JSON of an answer; raises `ServerError`."""
    with _server_errors():
        response = await client.request(method, path, json=body)
        if response.status_code != httpx.codes.OK:
            raise _refusal(response)
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"{path}: the answer is not JSON") from error


async def stream_events(
    client: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the objects of a server-sent event stream; raises `ServerError` if it ends without `[DONE]`."""
    with _server_errors():
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise _refusal(response)
            async for line in _lines(response):
                payload = line.removeprefix("data:").strip()
                if payload == "[DONE]":
                    return
                if line.startswith("data:"):
                    yield _event(payload)
    raise ServerError("the stream ended before [DONE]")


async def _lines(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Yield the lines of an event stream. httpx's would end at Unicode's separators, too, within an event's text."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = _LINE_END.split(rest + data)
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


@contextlib.contextmanager
def _server_errors() -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise ServerError(f"{type(error).__name__}: {error}".rstrip(": ")) from error


def _event(payload: str) -> dict[str, Any]:
    try:
        event = json.loads(payload)
    except ValueError as error:
        raise ServerError(f"an event is not JSON: {payload[:MAX_ERROR_CHARS]}") from error
    if not isinstance(event, dict):
        raise ServerError(f"an event is no object: {payload[:MAX_ERROR_CHARS]}")
    if event.get("error"):
        raise ServerError(_message(event) or payload[:MAX_ERROR_CHARS])
    return event


def _refusal(response: httpx.Response) -> ServerError:
    try:
        message = _message(response.json())
    except ValueError:
        message = None
    shown = message or response.text[:MAX_ERROR_CHARS] or response.reason_phrase
    return ServerError(f"HTTP {response.status_code}: {shown}", response.status_code)


def _message(answer: object) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return str(message)[:MAX_ERROR_CHARS] if message else None
