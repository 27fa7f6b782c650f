"""The OpenAI-compatible HTTP interface: translates between JSON or SSE and a gateway."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider import __version__
from outrider.cluster.api.anthropic import errors as anthropic_errors
from outrider.cluster.api.openai.answer import Answer, GenerationResponse, error_response
from outrider.cluster.api.openai.chat_messages import template_input
from outrider.cluster.api.openai.chats import Chats
from outrider.cluster.api.openai.format import ChatFormat, CompletionFormat, Format
from outrider.cluster.api.openai.messages import (
    OWN_NAMES,
    CountTokensBody,
    MessagesAnswer,
    MessagesBody,
    MessagesFormat,
)
from outrider.cluster.api.openai.protocol import (
    MAX_TOKENIZED_CHARS,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse_body,
    parse_json,
)
from outrider.cluster.api.openai.response_store import Responses
from outrider.cluster.api.openai.responses import ResponsesAnswer, ResponsesFormat
from outrider.cluster.api.openai.responses_protocol import ResponsesBody, in_own_field_names
from outrider.cluster.common.api_keys import KeyPolicy, shown_key
from outrider.cluster.common.errors import BodyTooLarge, BodyTooSlow, InvalidRequest, OutriderError, RequestFailed
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.replies.reader import ReplySyntax
from outrider.cluster.replies.tools import Tool, read_tool_use
from outrider.cluster.web.page import add_web_page

MESSAGES = anthropic_errors.PATH
MAX_BODY_BYTES = 16 << 20
BODY_TIMEOUT_S = 60.0  # a client that stops sending holds a connection, and memory for what it sent

HealthCheck = Callable[[], Awaitable[bool]]
Scrape = Callable[[], Awaitable[Collector]]


def build_api(
    gateway: Gateway,
    is_healthy: HealthCheck,
    *,
    scrape: Scrape | None = None,
    responses: Responses | None = None,
    wall_clock: Callable[[], float] = time.time,
    body_timeout_s: float = BODY_TIMEOUT_S,
    reply_syntax: ReplySyntax | None = None,
) -> FastAPI:
    """Return the FastAPI application of a gateway.

    `reply_syntax` is how the model writes tool calls and reasoning; None: by its tokenizer's response template, if any.
    `is_healthy` answers /health and, unless the gateway drains, /ready. `scrape` returns what /metrics shows; None: the
    gateway's own. `responses`: where those of /v1/responses are kept; None: here alone.
    """
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None)
    prepare(app, body_timeout_s)
    chats = Chats(syntax=reply_syntax or ReplySyntax(response_template=gateway.text.response_template))
    _add_generation_routes(app, gateway, wall_clock, chats)
    _add_responses_routes(app, gateway, wall_clock, chats, responses or Responses())
    _add_messages_routes(app, gateway, wall_clock, chats)
    _add_token_routes(app, gateway)
    _add_model_routes(app, gateway)
    _add_status_routes(app, gateway, is_healthy, scrape or _own_metrics(gateway))
    add_web_page(app)
    return app


def prepare(app: FastAPI, body_timeout_s: float = BODY_TIMEOUT_S) -> None:
    """Have an application read bodies by `read_json`, and answer errors in OpenAI's form."""
    app.state.body_timeout_s = body_timeout_s
    app.add_middleware(HeadMiddleware)
    app.add_exception_handler(OutriderError, _on_outrider_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected_error)


class HeadMiddleware:
    """Answer HEAD as GET, without the body: so load balancers and uptime checks ask."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


def _add_generation_routes(app: FastAPI, gateway: Gateway, wall_clock: Callable[[], float], chats: Chats) -> None:
    @app.post("/v1/completions", openapi_extra=_body_schema("/v1/completions", CompletionBody))
    async def completions(request: Request) -> Response:
        body = parse_body(await read_json(request), CompletionBody)
        gateway.check_model_name(body.model)
        answer = _answer(gateway, CompletionFormat(), int(wall_clock()), body)
        read = functools.partial(body.inputs, answer.id)
        inputs = await asyncio.to_thread(read) if body.has_structure else read()
        answer.requests = [await gateway.parse(item) for item in inputs]
        return GenerationResponse(answer, stream=bool(body.stream))

    @app.post("/v1/chat/completions", openapi_extra=_body_schema("/v1/chat/completions", ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = parse_body(await read_json(request), ChatBody)
        gateway.check_model_name(body.model)
        answer = _answer(gateway, ChatFormat(), int(wall_clock()), body)
        await chats.open(answer, body)
        return GenerationResponse(answer, stream=bool(body.stream))

    @app.post("/v1/embeddings")
    async def embeddings() -> Response:
        raise InvalidRequest("/v1/embeddings is not served: the model generates text", "model")


def _answer(gateway: Gateway, format_: Format, created: int, body: GenerationBody) -> Answer:
    """Return an answer that shows what the body asks for."""
    shown = bool(body.return_token_ids), bool(body.return_tokens_as_token_ids)
    return Answer(gateway, format_, created, body.include_usage, *shown)


def _add_responses_routes(
    app: FastAPI, gateway: Gateway, wall_clock: Callable[[], float], chats: Chats, store: Responses
) -> None:
    @app.post("/v1/responses", openapi_extra=_body_schema("/v1/responses", ResponsesBody))
    async def responses(request: Request) -> Response:
        body = parse_body(await read_json(request), ResponsesBody)
        gateway.check_model_name(body.model)
        if shown_key.get().policy is KeyPolicy.NEVER:
            body = body.model_copy(update={"store": False})
        messages = await body.messages(store.item)
        if body.previous_response_id is not None:
            before = await store.get(body.previous_response_id, "previous_response_id")
            messages = [*before.messages, *messages]
        answer = Answer(
            gateway, ResponsesFormat(store.id_prefix), int(wall_clock()), include_usage=True, return_token_ids=False
        )
        with in_own_field_names():
            await chats.open(answer, body.chat(messages), body.warnings())
        sent = ResponsesAnswer(answer=answer, body=body, messages=messages, store=store)
        return GenerationResponse(sent, stream=bool(body.stream))

    @app.get("/v1/responses/{response_id}")
    async def stored(response_id: str) -> dict[str, Any]:
        return (await store.get(response_id)).response

    @app.delete("/v1/responses/{response_id}")
    async def remove(response_id: str) -> dict[str, Any]:
        await store.remove(response_id)
        return {"id": response_id, "object": "response", "deleted": True}


def _add_messages_routes(app: FastAPI, gateway: Gateway, wall_clock: Callable[[], float], chats: Chats) -> None:
    """Add Anthropic's Messages API."""

    @app.post(MESSAGES, openapi_extra=_body_schema(MESSAGES, MessagesBody))
    async def messages(request: Request) -> Response:
        body = parse_body(await read_json(request), MessagesBody)
        gateway.check_model_name(body.model)
        answer = Answer(gateway, MessagesFormat(), int(wall_clock()), include_usage=True, return_token_ids=False)
        with in_own_field_names(OWN_NAMES):
            await chats.open(answer, *body.chat())
        sent = MessagesAnswer(answer=answer, max_tokens=body.max_tokens)
        return GenerationResponse(sent, stream=bool(body.stream))

    @app.post(f"{MESSAGES}/count_tokens", openapi_extra=_body_schema(f"{MESSAGES}/count_tokens", CountTokensBody))
    async def count_tokens(request: Request) -> dict[str, int]:
        body = parse_body(await read_json(request), CountTokensBody)
        gateway.check_model_name(body.model)
        chat, _ = body.chat()
        text = await _chat_text(gateway, chat, chat.tool_use().tools)
        return {"input_tokens": len(await gateway.text.encode(text, add_special_tokens=False))}


def _add_token_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add vLLM's /tokenize and /detokenize."""

    @app.post("/tokenize", openapi_extra=_body_schema("/tokenize", TokenizeBody))
    async def tokenize(request: Request) -> dict[str, Any]:
        body = parse_body(await read_json(request), TokenizeBody)
        gateway.check_model_name(body.model)
        add_special_tokens, text = body.add_special_tokens, body.prompt
        if body.messages is not None:  # a chat template writes the special tokens
            add_special_tokens = bool(add_special_tokens)
            text = await _chat_text(gateway, body, read_tool_use(body.tools or [], None, None).tools)
        ids = await gateway.text.encode(text or "", add_special_tokens=add_special_tokens is not False)
        return {
            "count": len(ids),
            "max_model_len": gateway.model.max_model_len,
            "tokens": ids,
            "token_strs": gateway.text.pieces(ids) if body.return_token_strs else None,
        }

    @app.post("/detokenize", openapi_extra=_body_schema("/detokenize", DetokenizeBody))
    async def detokenize(request: Request) -> dict[str, Any]:
        body = parse_body(await read_json(request), DetokenizeBody)
        gateway.check_model_name(body.model)
        gateway.require_in_vocabulary(body.tokens, "tokens")
        return {"prompt": await gateway.text.decode(body.tokens)}


async def _chat_text(gateway: Gateway, body: ChatBody | TokenizeBody, tools: Sequence[Tool]) -> str:
    """Return a chat that is to be tokenised, as the model's template writes it; raises `InvalidRequest`."""
    text = await gateway.text.render_chat(template_input(body.messages or []), **body.template_fields(tools))
    if len(text) > MAX_TOKENIZED_CHARS:
        raise InvalidRequest(f"messages must have at most {MAX_TOKENIZED_CHARS} characters", "messages")
    return text


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = (gateway.model.name, *gateway.model.adapters)
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}  # Anthropic's
        return {"object": "list", "data": [_model_object(gateway, name) for name in names], **page}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        gateway.check_model_name(name)
        return _model_object(gateway, name)


def _own_metrics(gateway: Gateway) -> Scrape:
    async def scrape() -> Collector:
        return gateway.metrics.registry

    return scrape


def _add_status_routes(app: FastAPI, gateway: Gateway, is_healthy: HealthCheck, scrape: Scrape) -> None:
    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if await is_healthy() else 503)

    @app.get("/ready")
    async def ready() -> Response:
        return Response(status_code=200 if not gateway.is_draining and await is_healthy() else 503)

    @app.get("/live")
    async def live() -> Response:
        return Response(status_code=200)

    @app.get("/load")
    async def load() -> dict[str, Any]:
        return gateway.load()

    @app.get("/version")
    async def version() -> dict[str, Any]:
        parts = gateway.batch_dependent
        return {
            "version": __version__,
            "batch_invariant": None if parts is None else not parts,
            "batch_dependent": parts,
        }

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(await scrape()), media_type=CONTENT_TYPE_LATEST)


def _model_object(gateway: Gateway, name: str) -> dict[str, Any]:
    model = gateway.model
    parent = {"parent": model.name} if name != model.name else {}  # an adapter's, as in vLLM
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "outrider",
        "max_model_len": model.max_model_len,
        "type": "model",  # these three are Anthropic's
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).isoformat(),
        **parent,
    }


def _body_schema(path: str, kind: type[BaseModel]) -> dict[str, Any]:
    """Describe a route's body in the OpenAPI document: FastAPI does not see it, since routes read and check it."""
    place = f"#/paths/{path.replace('/', '~1')}/post/requestBody/content/application~1json/schema/$defs/{{model}}"
    schema = kind.model_json_schema(ref_template=place)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_json(request: Request, *, empty: object = None) -> object:
    """Read a JSON body of at most `MAX_BODY_BYTES`, which are counted; raises `InvalidRequest`.

    `empty`: what stands for no body; None: there must be one.
    """
    body, timeout_s = bytearray(), request.app.state.body_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_BYTES:
                    raise BodyTooLarge(f"the body must have at most {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise BodyTooSlow(f"the body must come within {timeout_s:g} s") from None
    return empty if not body and empty is not None else parse_json(bytes(body))


async def _on_outrider_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    return error_response(error, request.url.path)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Give the framework's errors (no such path, wrong method) the form of the API."""
    assert isinstance(error, HTTPException)
    if anthropic_errors.is_messages_path(request.url.path):
        body = anthropic_errors.status_object(error.status_code, str(error.detail))
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)
    content = {"message": str(error.detail), "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": content}, status_code=error.status_code, headers=error.headers)


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """Answer a client that disconnected within its body: the answer is not read, and no error is logged."""
    return Response(status_code=400)


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    return error_response(RequestFailed("internal error"), request.url.path)
