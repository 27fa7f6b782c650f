"""`outrider demo`: a real model served, asked, flooded and hurt, in under three minutes."""

from __future__ import annotations

from typing import Any

import click

from outrider.cluster.cli.options import configure, model_options, usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of
from outrider.cluster.config.known_models import SMOLLM2

PLAIN_WIDTH = 160  # columns of the closing table where the output is no terminal


@click.command(context_settings=CONTEXT_SETTINGS)
@model_options
def demo(model: str | None, **options: Any) -> None:
    """Serve MODEL (smollm2 if none is given), ask it, flood it, kill its drafter, and say what was measured."""
    config = configure(model=model or SMOLLM2, **options)
    from outrider.cluster.demo import show
    from outrider.cluster.replicas.serving import DeployError

    try:
        with usage_errors():
            show.run(config, console_of(PLAIN_WIDTH))
    except DeployError as error:
        raise click.ClickException(str(error)) from error
