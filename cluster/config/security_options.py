"""The options of `outrider serve` that say who may speak to the service, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

Decorator = Callable[[Callable[..., None]], Callable[..., None]]
_PUBLIC_OPTIONS = (
    click.option(
        "--api-key",
        multiple=True,
        help="A key that clients may show; may be repeated, and sha256:HEX hides it from ps. Those of the environment "
        "variable OUTRIDER_API_KEY (comma-separated) count too.",
    ),
    click.option("--api-key-file", help="Keys, one a line, plain or sha256:HEX; # begins a comment line."),
    click.option("--ssl-certfile", help="PEM: certificate of the HTTP and gRPC ports."),
    click.option("--ssl-keyfile", help="PEM: key of --ssl-certfile."),
    click.option("--ssl-ca-certs", help="PEM: clients must present a certificate signed by one of these."),
)
_LINK_OPTIONS = (
    click.option(
        "--link-ssl-certfile",
        help="PEM: certificate of our own services towards each other, for servers and clients. Always mutual TLS.",
    ),
    click.option("--link-ssl-keyfile", help="PEM: key of --link-ssl-certfile."),
    click.option("--link-ssl-ca-certs", help="PEM: who signs our own services' certificates."),
    click.option(
        "--link-ssl-server-name",
        help="Name in our own services' certificates, where replicas share one on addresses not known before. "
        "Default: the address that a replica listens at.",
    ),
)


def security_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for API keys and TLS."""
    return _with(_PUBLIC_OPTIONS, link_security_options(command))


def link_security_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for TLS between our own services."""
    return _with(_LINK_OPTIONS, command)


def _with(options: Sequence[Decorator], command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(options):
        command = option(command)
    return command
