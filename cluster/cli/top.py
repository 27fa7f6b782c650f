"""`outrider top`: watch a service that runs."""

from __future__ import annotations

import contextlib
from typing import Any

import click

from outrider.cluster.cli.usage import PLAIN_WIDTH, usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS, server_options
from outrider.cluster.common.terminal import console_of


@click.command(context_settings=CONTEXT_SETTINGS)
@server_options
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds per frame.")
@click.option("--once", is_flag=True, help="Print one frame and stop; exit status 1 without an answer.")
def top(interval: float, once: bool, **server: Any) -> None:
    """Watch a running service: pools, load, prices, acceptance, the router's decisions."""
    import time

    from outrider.cluster.client import top as watching
    from outrider.cluster.client.openai_client import Server

    with usage_errors(), contextlib.suppress(KeyboardInterrupt):
        console = console_of(PLAIN_WIDTH)
        state = watching.run(Server(**server), console, interval_s=interval, once=once, clock=time.monotonic)
        if state.error is not None:
            raise click.exceptions.Exit(1)
