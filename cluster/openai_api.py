"""The OpenAI-compatible HTTP interface: a thin shell that translates between JSON or SSE and a gateway."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from outrider.cluster.errors import InvalidRequest, OutriderError, Overloaded, RequestFailed, mapping_of
from outrider.cluster.gateway import Gateway, GatewayChunk, Usage, ValidRequest
from outrider.cluster.openai_protocol import (
    ChatBody,
    ChatFormat,
    CompletionBody,
    CompletionFormat,
    Format,
    error_object,
    metrics_object,
    parse_body,
    usage_object,
)
from outrider.verifier_service.request import SpeculationMetrics

logger = logging.getLogger(__name__)

MAX_REQUEST_ID_CHARS = 128

HealthCheck = Callable[[], Awaitable[bool]]
ResultT = TypeVar("ResultT")


def build_api(gateway: Gateway, is_healthy: HealthCheck, *, wall_clock: Callable[[], float] = time.time) -> FastAPI:
    """Return the FastAPI application of a gateway; `is_healthy` answers /health."""
    app = FastAPI(title="Outrider", docs_url=None, redoc_url=None)
    _add_generation_routes(app, gateway, wall_clock)
    _add_status_routes(app, gateway, is_healthy)
    app.add_exception_handler(OutriderError, _on_outrider_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected_error)
    return app


def _add_generation_routes(app: FastAPI, gateway: Gateway, wall_clock: Callable[[], float]) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = parse_body(await _json(request), CompletionBody)
        gateway.check_model_name(body.model)
        answer = _Answer(gateway, CompletionFormat(), int(wall_clock()), body.include_usage)
        answer.requests = [gateway.parse(item) for item in body.inputs(answer.id)]
        return GenerationResponse(answer, stream=bool(body.stream), headers=_id_header(request))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = parse_body(await _json(request), ChatBody)
        gateway.check_model_name(body.model)
        answer = _Answer(gateway, ChatFormat(), int(wall_clock()), body.include_usage)
        answer.requests = [gateway.parse(body.input(answer.id, gateway.tokenizer))]
        return GenerationResponse(answer, stream=bool(body.stream), headers=_id_header(request))


def _add_status_routes(app: FastAPI, gateway: Gateway, is_healthy: HealthCheck) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_object(gateway)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        gateway.check_model_name(name)
        return _model_object(gateway)

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if await is_healthy() else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _model_object(gateway: Gateway) -> dict[str, Any]:
    model = gateway.model
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "outrider",
        "max_model_len": model.max_model_len,
    }


async def _json(request: Request) -> object:
    try:
        return await request.json()
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error


def _id_header(request: Request) -> dict[str, str]:
    given = request.headers.get("x-request-id", "")
    return {"X-Request-Id": given[:MAX_REQUEST_ID_CHARS] or uuid.uuid4().hex}


@dataclass(slots=True)
class _Answer:
    """What one HTTP request is answered with: the chunks of all its prompts, and what they share."""

    gateway: Gateway
    format: Format
    created: int
    include_usage: bool
    requests: list[ValidRequest] = field(default_factory=list)
    id: str = ""

    def __post_init__(self) -> None:
        # Ours, not X-Request-Id: a client may send that twice, and the id names a generation in the cluster.
        self.id = self.format.id_prefix + uuid.uuid4().hex

    def envelope(self, object_name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        model = self.gateway.model.name
        return {"id": self.id, "object": object_name, "created": self.created, "model": model, "choices": choices}

    async def chunks(self) -> AsyncIterator[tuple[int, GatewayChunk]]:
        """Yield chunks with their choice's index in the answer: choice i of prompt p is p * n + i."""
        async with _merged([self.gateway.generate(request) for request in self.requests]) as chunks:
            async for prompt_index, chunk in chunks:
                yield prompt_index * self.requests[0].n + chunk.index, chunk

    async def unary(self) -> dict[str, Any]:
        """Run to the end and return the one response object."""
        texts: dict[int, list[str]] = {}
        last: dict[int, GatewayChunk] = {}
        async with aclosing(self.chunks()) as chunks:  # type: ignore[type-var]
            async for index, chunk in chunks:
                texts.setdefault(index, []).append(chunk.text)
                last[index] = chunk
        choices = [self.format.choice(index, "".join(texts[index]), _reason(last[index])) for index in sorted(last)]
        return {
            **self.envelope(self.format.object_name, choices),
            "usage": self._usage({index: chunk.usage for index, chunk in last.items() if chunk.usage}),
            "metrics": metrics_object([last[index].speculation for index in sorted(last)]),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the SSE events of a stream, `[DONE]` last."""
        usages: dict[int, Usage] = {}
        begun: set[int] = set()
        async with aclosing(self.chunks()) as chunks:  # type: ignore[type-var]
            async for index, chunk in chunks:
                is_first = index not in begun
                begun.add(index)
                if chunk.usage is not None:
                    usages[index] = chunk.usage
                if is_first or chunk.text or chunk.finish_reason:
                    yield _event(self._chunk_object(index, chunk, is_first))
        if self.include_usage:
            usage = self._usage(usages)
            yield _event({**self.envelope(self.format.chunk_object_name, []), "usage": usage})
        yield b"data: [DONE]\n\n"

    def _chunk_object(self, index: int, chunk: GatewayChunk, is_first: bool) -> dict[str, Any]:
        choice = self.format.chunk_choice(chunk, index, is_first=is_first)
        shown = self.envelope(self.format.chunk_object_name, [choice])
        if self.include_usage:
            shown["usage"] = None  # as OpenAI: null on all chunks but the last
        if chunk.finish_reason is not None:
            speculation: SpeculationMetrics | None = chunk.speculation
            shown["metrics"] = metrics_object([speculation])
        return shown

    def _usage(self, usages: dict[int, Usage]) -> dict[str, Any]:
        num_choices = self.requests[0].n
        return usage_object(usages.values(), (usage for index, usage in usages.items() if index % num_choices == 0))


def _reason(chunk: GatewayChunk) -> str | None:
    return chunk.finish_reason.value if chunk.finish_reason else None


def _event(message: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(message, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


class GenerationResponse(Response):
    """An answer that is generated while it is sent, and cancelled when the client goes away.

    The status line waits for the first event, so that a refusal has its right status in a stream too.
    """

    def __init__(self, answer: _Answer, *, stream: bool, headers: dict[str, str]) -> None:
        super().__init__(headers=headers)
        self._answer = answer
        self._stream = stream
        self._extra_headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._send_events(scope, receive, send) if self._stream else self._send_object(scope, receive, send)
        try:
            await _unless_disconnected(receive, work)
        except ClientDisconnected:
            logger.info("client of %s disconnected", self._answer.id)

    async def _send_object(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = JSONResponse(await self._answer.unary(), headers=self._extra_headers)
        except OutriderError as error:
            response = error_response(error, self._extra_headers)
        await response(scope, receive, send)

    async def _send_events(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        async with aclosing(self._answer.events()) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    if not started:
                        await send(self._start_message())
                        started = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except OutriderError as error:
                if not started:
                    await error_response(error, self._extra_headers)(scope, receive, send)
                    return
                await send({"type": "http.response.body", "body": _event(error_object(error)), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _start_message(self) -> dict[str, Any]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",  # a buffering proxy would defeat streaming
            "x-request-id": self._extra_headers["X-Request-Id"],
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}


class ClientDisconnected(Exception):
    """The client went away before its answer was complete."""


async def _unless_disconnected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work`, cancelling it when the client disconnects; raises `ClientDisconnected` then."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for part in (task, watcher):
            part.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def _merged(
    streams: Sequence[AsyncIterator[GatewayChunk]],
) -> AsyncIterator[AsyncIterator[tuple[int, GatewayChunk]]]:
    """Merge the prompts' streams as their chunks come; leaving the context closes all of them."""
    queue: asyncio.Queue[tuple[int, GatewayChunk | Exception | None]] = asyncio.Queue()
    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
        stack.push_async_callback(_cancel_all, tasks)
        yield _drain(queue, num_streams=len(streams))


async def _pump(
    index: int, stream: AsyncIterator[GatewayChunk], queue: asyncio.Queue[tuple[int, GatewayChunk | Exception | None]]
) -> None:
    try:
        async with aclosing(stream):  # type: ignore[type-var]
            async for chunk in stream:
                queue.put_nowait((index, chunk))
        queue.put_nowait((index, None))
    except Exception as error:  # raised again by `_drain`, at the consumer
        queue.put_nowait((index, error))


async def _drain(
    queue: asyncio.Queue[tuple[int, GatewayChunk | Exception | None]], num_streams: int
) -> AsyncIterator[tuple[int, GatewayChunk]]:
    while num_streams:
        index, item = await queue.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            num_streams -= 1
        else:
            yield index, item


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def error_response(error: OutriderError, headers: dict[str, str]) -> JSONResponse:
    """Render an error with its status, and when to come back where that is known."""
    if isinstance(error, Overloaded):
        headers = {**headers, "Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return JSONResponse(error_object(error), status_code=mapping_of(error).http_status, headers=headers)


async def _on_outrider_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    return error_response(error, _id_header(request))


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Give the framework's own refusals (no such path, wrong method) OpenAI's form."""
    assert isinstance(error, HTTPException)
    content = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": content}, status_code=error.status_code, headers=_id_header(request))


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    return error_response(RequestFailed("internal error"), _id_header(request))
