"""`outrider demo`: a real model served, asked, flooded and hurt, in under three minutes."""

from __future__ import annotations

from typing import Any

import click

from outrider.cluster.cli.options import PLAIN_WIDTH, configure, usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of
from outrider.cluster.config.config_file import read_speculative_config
from outrider.cluster.config.known_models import SMOLLM2


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", default=SMOLLM2)
@click.option(
    "--speculative-config",
    "-sc",
    metavar="JSON",
    callback=read_speculative_config,
    help='How to draft: {"method": "ngram", "prompt_lookup_max": 4}. Default: the model\'s own drafter.',
)
def demo(model: str, speculative_config: dict[str, Any]) -> None:
    """Serve MODEL (default: smollm2), answer questions, stand a burst, lose a drafter; close with a table."""
    config = configure(model=model, speculative_config=speculative_config)
    from outrider.cluster.demo import show
    from outrider.cluster.replicas.serving import DeployError

    try:
        with usage_errors():
            show.run(config, console_of(PLAIN_WIDTH))
    except DeployError as error:
        raise click.ClickException(str(error)) from error
