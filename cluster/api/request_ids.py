"""Give every HTTP request and gRPC call an id for the logs: the client's X-Request-Id, else a new one."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable

import grpc
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cluster.common.logs import request_id
from outrider.cluster.gateway.request_parser import is_safe_id

_HEADER = "x-request-id"
_RAW_HEADER = _HEADER.encode()


class RequestIdMiddleware:
    """Set the id of a request's task and header; echo it, unless the proxy in front does, as Serve's."""

    def __init__(self, app: ASGIApp, *, is_echoed_by_proxy: bool = False) -> None:
        self._app = app
        self._is_echoed_by_proxy = is_echoed_by_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        id_ = _id_of({name: value.decode("latin-1") for name, value in headers}.get(_RAW_HEADER))
        others = [(name, value) for name, value in headers if name != _RAW_HEADER]
        header = (_RAW_HEADER, id_.encode())

        async def echo(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        token = request_id.set(id_)
        try:
            await self._app(
                {**scope, "headers": [*others, header]}, receive, send if self._is_echoed_by_proxy else echo
            )
        finally:
            request_id.reset(token)


class RequestIdInterceptor(grpc.aio.ServerInterceptor):
    """Set the id of a call's task."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        request_id.set(_id_of(dict(handler_call_details.invocation_metadata).get(_HEADER)))  # until the task ends
        return await continuation(handler_call_details)


def _id_of(given: str | None) -> str:
    return given if given is not None and is_safe_id(given) else uuid.uuid4().hex
