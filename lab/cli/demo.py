"""`outrider demo`: a real model served, asked, flooded and hurt, in under three minutes."""

from __future__ import annotations

from typing import Any

import click

from outrider.cluster.cli.options import configure, model_options
from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of

PLAIN_WIDTH = 160  # columns of the closing table where the output is no terminal


@click.command(context_settings=CONTEXT_SETTINGS)
@model_options
def demo(**options: Any) -> None:
    """Serve MODEL, by default smollm2: ask it, flood it, kill its drafter, and say what was measured."""
    config = configure(**options)
    from outrider.cluster.replicas.serving import DeployError
    from outrider.lab.demo import show

    try:
        with usage_errors():
            show.run(config, console_of(PLAIN_WIDTH))
    except DeployError as error:
        raise click.ClickException(str(error)) from error
