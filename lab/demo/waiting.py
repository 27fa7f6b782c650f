"""What is shown while one waits: a bar on a terminal, one line in a log, for no wait here is long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click
from rich.console import Console

from outrider.cluster.common.terminal import OnWork, show_work
from outrider.cluster.replicas.serving import OnPhase, tell_phases


@contextlib.contextmanager
def show_wait(name: str, total: float, console: Console | None = None) -> Iterator[OnWork]:
    """Show on stderr that one waits and how far it is; yields a listener as `show_work` does."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with show_work(name, total, console=console) as on_work:
            yield on_work
    else:
        console.print(f"{name} …", highlight=False, soft_wrap=True)
        yield lambda done, word: None


@contextlib.contextmanager
def show_phases() -> Iterator[OnPhase]:
    """Tell on stderr each phase of the start with its seconds; a terminal sees that it goes on."""
    console = Console(stderr=True)
    tell = tell_phases(lambda line: click.echo(line, err=True))
    if not console.is_terminal:
        yield tell
        return
    with console.status("starting") as status:

        def on_phase(phase: str) -> None:
            tell(phase)
            status.update(phase)

        yield on_phase
