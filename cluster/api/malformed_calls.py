"""Answer INVALID_ARGUMENT to a request that does not parse: grpc itself answers UNKNOWN and logs an exception."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

Handler: TypeAlias = grpc.RpcMethodHandler
Context: TypeAlias = grpc.aio.ServicerContext


@dataclass(frozen=True, slots=True)
class _Malformed:
    """In place of an unreadable request, until its call can be refused."""

    problem: str


class MalformedCallInterceptor(grpc.aio.ServerInterceptor):
    """Refuse unreadable requests. It must be the last interceptor, next to the servicers."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler = await continuation(handler_call_details)
        if handler is None:  # no such method
            return None
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary), _reader(handler), handler.response_serializer
            )
        if handler.unary_stream is not None:
            wrap = _stream if inspect.isasyncgenfunction(handler.unary_stream) else _unary
            return grpc.unary_stream_rpc_method_handler(
                wrap(handler.unary_stream), _reader(handler), handler.response_serializer
            )
        if handler.stream_stream is not None:
            wrap = _streams if inspect.isasyncgenfunction(handler.stream_stream) else _both
            return grpc.stream_stream_rpc_method_handler(
                wrap(handler.stream_stream), handler.request_deserializer, handler.response_serializer
            )
        return handler


def _reader(handler: Handler) -> Callable[[bytes], Any]:
    def read(payload: bytes) -> Any:
        try:
            return handler.request_deserializer(payload)
        except DecodeError as error:
            return _Malformed(str(error))

    return read


def _unary(behaviour: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    async def answer(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            await _refuse(context, request.problem)
        return await behaviour(request, context)

    return answer


def _stream(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
        if isinstance(request, _Malformed):
            await _refuse(context, request.problem)
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                yield response

    return answer


def _both(behaviour: Callable[[Any, Context], Awaitable[None]]) -> Callable[[Any, Context], Awaitable[None]]:
    async def answer(requests: Any, context: Context) -> None:
        try:
            await behaviour(requests, context)
        except DecodeError as error:  # while the behaviour read a request
            await _refuse(context, str(error))

    return answer


def _streams(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], AsyncIterator[Any]]:
    async def answer(requests: Any, context: Context) -> AsyncIterator[Any]:
        try:
            async with aclosing(behaviour(requests, context)) as responses:
                async for response in responses:
                    yield response
        except DecodeError as error:
            await _refuse(context, str(error))

    return answer


async def _refuse(context: Context, problem: str) -> NoReturn:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is malformed: {problem}")
    raise AssertionError("context.abort returned")
