"""Keys, checked in front of the HTTP application and of the gRPC services, which find the shown key set.

Open without a key: probes, /metrics (which holds neither prompts nor request ids) and gRPC's health service, whose
clients have no key, and the web page's files, since its reader types a key there. Who may do what: `access`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
from starlette._utils import get_route_path  # the path that the router will match, and no other
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.cluster.api.access import CLIENT_RPCS, OPEN_PATHS, OPEN_RPCS, require_admin
from outrider.cluster.api.openai.answer import error_response
from outrider.cluster.common.api_keys import HOW_TO_SHOW, NO_KEY, ApiKeys, ShownKey, shown_key
from outrider.cluster.common.errors import OutriderError, Unauthenticated

_REFUSAL = f"a valid API key is needed, {HOW_TO_SHOW}"


class ApiKeyMiddleware:
    """Answer 401 to HTTP requests without a known key, 403 to those that need an admin's.

    Messages pass through unbuffered: streams stay streams.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, *, admin_paths: frozenset[str] = frozenset(), is_private: bool = False
    ) -> None:
        """`admin_paths`: see `access.admin_paths`. `is_private`: only this machine's programs reach the port."""
        self._app, self._keys = app, keys
        self._admin_paths, self._is_private = admin_paths, is_private

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (path := get_route_path(scope)) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            key = self._admit(scope, path)
        except OutriderError as refusal:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await error_response(refusal, path)(scope, receive, send)
            return
        token = shown_key.set(key)
        try:
            await self._app(scope, receive, send)
        finally:
            shown_key.reset(token)

    def _admit(self, scope: Scope, path: str) -> ShownKey:
        """Return the shown key; raises what the request is refused for."""
        key = self._keys.admit(_headers(scope)) if self._keys else NO_KEY
        if key is None:
            raise Unauthenticated(_REFUSAL)
        if path in self._admin_paths:
            require_admin(self._keys, list(_headers(scope)), path, is_private=self._is_private)
        return key


def _headers(scope: Scope) -> Iterator[tuple[str, str]]:
    return ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuse calls without a known key, and those that need an admin's, before their messages are read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method, shown = handler_call_details.method, handler_call_details.invocation_metadata
        if method.startswith(OPEN_RPCS):
            return await continuation(handler_call_details)
        if (key := self._keys.admit(shown)) is None:
            return _refuse_rpc(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
        shown_key.set(key)  # until the call's task ends
        handler = await continuation(handler_call_details)
        if handler is not None and method not in CLIENT_RPCS and not self._keys.is_admin(shown):
            return _refuse_rpc(grpc.StatusCode.PERMISSION_DENIED, f"{method} needs an admin's key, {HOW_TO_SHOW}")
        return handler


def _refuse_rpc(code: grpc.StatusCode, reason: str) -> grpc.RpcMethodHandler:
    async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
        await context.abort(code, reason)

    return grpc.stream_stream_rpc_method_handler(refuse)
