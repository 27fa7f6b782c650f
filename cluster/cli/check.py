"""`outrider check`: a YAML of Ray Serve, before it is deployed."""

from __future__ import annotations

from pathlib import Path

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def check(file: Path) -> None:
    """Check FILE, a YAML for `serve run` or `serve deploy`: one line says what is wrong with it.

    Ray Serve finds that out in a process of its own, and `serve run` then waits until it is interrupted.
    """
    from outrider.cluster.replicas.manifest import check_manifest

    try:
        names = check_manifest(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.ClickException(f"{file}: {error}") from error
    click.echo(f"{file}: {', '.join(names)}: nothing wrong")
