"""gRPC between our own services: plaintext or mutual TLS, and a secret that callers show where there is no TLS."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.verifier_service.messages.link import CHANNEL_OPTIONS

SECRET_KEY = "outrider-link-secret"  # of the calls' metadata
_REFUSAL = "our own services show their secret on links: give the same --link-secret-file, or --link-ssl-*, to all"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCredentials:
    """What a service shows its peers: its certificate, or the secret that all of them know.

    `channel`: its certificate and the CA it trusts; None: plaintext. Without `server_name`, a peer's certificate must
    name the peer's address.
    """

    channel: grpc.ChannelCredentials | None = None
    server_name: str | None = None
    secret: str | None = None


def open_channel(address: str, credentials: LinkCredentials | None, *options: tuple[str, int]) -> grpc.aio.Channel:
    """Open a channel with the links' options, overridden by `options`; plaintext without a certificate.

    Calls over it bring `metadata_of` the credentials.
    """
    chosen: dict[str, int | str] = {**dict(CHANNEL_OPTIONS), **dict(options)}  # a dict: grpc takes the first duplicate
    if credentials is None or credentials.channel is None:
        return grpc.aio.insecure_channel(address, options=tuple(chosen.items()))
    if credentials.server_name is not None:
        chosen["grpc.ssl_target_name_override"] = credentials.server_name
    return grpc.aio.secure_channel(address, credentials.channel, options=tuple(chosen.items()))


def metadata_of(credentials: LinkCredentials | None) -> tuple[tuple[str, str], ...]:
    """Return what every call of a service brings along."""
    return () if credentials is None or credentials.secret is None else ((SECRET_KEY, credentials.secret),)


class SecretInterceptor(grpc.aio.ServerInterceptor):
    """Answer UNAUTHENTICATED to calls without the secret, before their messages are read."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        shown = [value for key, value in handler_call_details.invocation_metadata if key == SECRET_KEY]
        if any(hmac.compare_digest(str(value).encode(), self._secret) for value in shown):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, _REFUSAL)
