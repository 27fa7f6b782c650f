"""gRPC channels between our own services: plaintext, or mutual TLS."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from outrider.verifier_service.messages.link import CHANNEL_OPTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCredentials:
    """A service's certificate, the CA it trusts, and the name expected in its peers' certificates.

    Without `server_name`, a peer's certificate must name the peer's address.
    """

    channel: grpc.ChannelCredentials
    server_name: str | None = None


def open_channel(address: str, credentials: LinkCredentials | None, *options: tuple[str, int]) -> grpc.aio.Channel:
    """Open a channel with the links' options, overridden by `options`; plaintext without credentials."""
    chosen: dict[str, int | str] = {**dict(CHANNEL_OPTIONS), **dict(options)}  # a dict: grpc takes the first duplicate
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=tuple(chosen.items()))
    if credentials.server_name is not None:
        chosen["grpc.ssl_target_name_override"] = credentials.server_name
    return grpc.aio.secure_channel(address, credentials.channel, options=tuple(chosen.items()))
