"""Shared by commands: the help option, and the options of clients of a running server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

API_KEY_VARIABLE = "OUTRIDER_API_KEY"
# set on every command, not inherited: click caches a command's help option at its first call
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SERVER_OPTIONS = (
    click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server, with or without /v1."),
    click.option("--api-key", envvar=API_KEY_VARIABLE, show_envvar=True, help="Sent as a bearer token."),
    click.option("--ssl-ca-certs", type=_FILE, help="PEM: whom to trust. Default: the system's authorities."),
    click.option("--ssl-certfile", type=_FILE, help="PEM: our certificate, where the server asks for one."),
    click.option("--ssl-keyfile", type=_FILE, help="PEM: the key of --ssl-certfile, unless it is in there."),
)
admin_key_option = click.option(  # of servers
    "--admin-api-key",
    multiple=True,
    help="A key that also opens what changes weights, others' requests or files; may be repeated, and sha256:HEX hides "
    "it from ps. Those of the environment variable OUTRIDER_ADMIN_API_KEY (comma-separated) count too.",
)


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a server's address, key and certificates."""
    for option in reversed(_SERVER_OPTIONS):
        command = option(command)
    return command
