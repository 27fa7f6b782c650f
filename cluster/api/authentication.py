"""API keys, checked in front of the HTTP application and of the gRPC services, which find the shown key set.

Open without a key: probes, /metrics (which holds neither prompts nor request ids) and gRPC's health service, whose
clients have no key, and the web page's files, since its reader types a key there.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.cluster.api.openai.answer import error_response
from outrider.cluster.common.api_keys import ApiKeys, shown_key
from outrider.cluster.common.errors import Unauthenticated
from outrider.cluster.web.page import FILES as WEB_FILES

OPEN_PATHS = frozenset({"/health", "/ready", "/live", "/metrics", *WEB_FILES})
OPEN_GRPC_PREFIX = "/grpc.health.v1.Health/"
_REFUSAL = "a valid API key is needed, as Authorization: Bearer KEY or x-api-key: KEY"


class ApiKeyMiddleware:
    """Answer 401 to HTTP requests without a known key. Messages pass through unbuffered: streams stay streams."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif (key := self._keys.admit(_headers(scope))) is not None:
            token = shown_key.set(key)
            try:
                await self._app(scope, receive, send)
            finally:
                shown_key.reset(token)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await error_response(Unauthenticated(_REFUSAL))(scope, receive, send)


def _headers(scope: Scope) -> Iterator[tuple[str, str]]:
    return ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Answer UNAUTHENTICATED to calls without a known key, before their messages are read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(OPEN_GRPC_PREFIX):
            return await continuation(handler_call_details)
        if (key := self._keys.admit(handler_call_details.invocation_metadata)) is not None:
            shown_key.set(key)  # until the call's task ends
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
