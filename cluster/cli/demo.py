"""`outrider demo`: the embedded pair, served, asked and stopped."""

from __future__ import annotations

import click

from outrider.cluster.cli.options import configure
from outrider.cluster.common.server_options import CONTEXT_SETTINGS


@click.command(context_settings=CONTEXT_SETTINGS)
def demo() -> None:
    """Serve the embedded pair, stream over HTTP and gRPC with speculation off and on, stop."""
    from outrider.cluster.cli import demonstration

    # pinned, so that both sides are shown whatever pays on this machine
    demonstration.run(configure(speculation="always"))
