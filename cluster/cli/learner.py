"""`outrider learner`: watch and steer what trains the drafters of a service that runs."""

from __future__ import annotations

from typing import Any

import click

from outrider.cluster.cli.usage import PLAIN_WIDTH, usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS, server_options
from outrider.cluster.common.terminal import console_of

_pool_option = click.option("--pool", help="Whose learner, where several pools learn.")


@click.group(context_settings=CONTEXT_SETTINGS)
def learner() -> None:
    """Watch and steer the learners of a running service: docs/learning.md."""


@learner.command(context_settings=CONTEXT_SETTINGS)
@server_options
@_pool_option
def status(pool: str | None, **server: Any) -> None:
    """Show what each learner is at, its versions, and how many tokens of their drafts were right."""
    from outrider.cluster.client.learner import render

    learners = [found for found in _asked(server) if pool in (None, found["pool"])]
    console_of(PLAIN_WIDTH).print(render(learners))


@learner.command(context_settings=CONTEXT_SETTINGS)
@server_options
@_pool_option
def pause(pool: str | None, **server: Any) -> None:
    """Train no more and try nothing; what serves goes on."""
    _act("pause", server, pool)


@learner.command(context_settings=CONTEXT_SETTINGS)
@server_options
@_pool_option
def resume(pool: str | None, **server: Any) -> None:
    """Go on after a pause."""
    _act("resume", server, pool)


@learner.command(context_settings=CONTEXT_SETTINGS)
@server_options
@_pool_option
def rollback(pool: str | None, **server: Any) -> None:
    """Serve the version before this one, now."""
    _act("rollback", server, pool)


@learner.command(context_settings=CONTEXT_SETTINGS)
@server_options
@_pool_option
@click.option("--folder", required=True, help="Of weights, where the learner runs: as what the pool started with.")
def publish(pool: str | None, folder: str, **server: Any) -> None:
    """Serve a folder's weights without a trial; they are watched, and rolled back if they do worse."""
    _act("publish", server, pool, folder)


@learner.command(context_settings=CONTEXT_SETTINGS)
@server_options
@_pool_option
@click.option("--folder", required=True, help="To write, where the learner runs; --draft-model takes it.")
def export(pool: str | None, folder: str, **server: Any) -> None:
    """Copy the version that serves to a folder."""
    _act("export", server, pool, folder)


def _act(action: str, server: dict[str, Any], pool: str | None, folder: str | None = None) -> None:
    given = {"pool": pool, "folder": folder}
    answer = _asked(server, action, {name: value for name, value in given.items() if value is not None})
    click.echo(f"{answer['pool']}: {answer['message']}")


def _asked(server: dict[str, Any], action: str | None = None, body: dict[str, Any] | None = None) -> Any:
    """Return the server's answer; what goes wrong is one line."""
    from outrider.cluster.client.learner import ask
    from outrider.cluster.client.openai_client import Server, ServerError

    with usage_errors():
        try:
            return ask(Server(**server), action, body)
        except ServerError as error:
            raise click.ClickException(str(error)) from error
