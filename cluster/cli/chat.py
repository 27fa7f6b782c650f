"""`outrider chat`: talk to a server that runs."""

from __future__ import annotations

from typing import Any

import click

from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS, server_options


@click.command(context_settings=CONTEXT_SETTINGS)
@server_options
@click.option("--model", help="Default: the first that the server lists.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of one answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--system", help="A first message that tells the model how to behave.")
def chat(model: str | None, max_tokens: int, temperature: float, system: str | None, **server: Any) -> None:
    """Talk to a running server; shows each answer's tokens/s, time to first token and acceptance."""
    import time

    from outrider.cluster.client import chat as conversation
    from outrider.cluster.client.openai_client import Server, ServerError

    options = conversation.ChatOptions(model=model, max_tokens=max_tokens, temperature=temperature, system=system)
    with usage_errors():
        try:
            conversation.run(Server(**server), options, time.perf_counter)
        except ServerError as error:
            raise click.ClickException(str(error)) from error
