"""What is shown while one waits: a bar on a terminal, in a log a line every few seconds."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import click
from rich.console import Console

from outrider.cluster.common.terminal import OnWork, show_work
from outrider.cluster.replicas.serving import OnPhase, tell_phases
from outrider.lab.demo.ask import Token

SILENCE_S = 2.5  # after which a log is told that something still goes on


@contextlib.contextmanager
def show_wait(
    name: str, total: float, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnWork]:
    """Show on stderr that one waits and how far it is; yields a listener as `show_work` does."""
    console = console or Console(stderr=True)
    if console.is_terminal:
        with show_work(name, total, console=console) as on_work:
            yield on_work
        return
    last_s = clock()
    console.print(f"{name} …", highlight=False, soft_wrap=True)

    def say(done: float, word: str) -> None:
        nonlocal last_s
        if clock() - last_s >= SILENCE_S:
            last_s = clock()
            console.print(f"{name}: {word}", highlight=False, soft_wrap=True)

    yield say


class Count:
    """Counts the tokens that streams bring, for whoever waits for them."""

    def __init__(self, on_work: OnWork) -> None:
        self._on_work = on_work
        self._num_tokens = 0

    def take(self, tokens: Sequence[Token]) -> None:
        self._num_tokens += len(tokens)
        self._on_work(self._num_tokens, f"{self._num_tokens} tokens")


@contextlib.contextmanager
def show_phases() -> Iterator[OnPhase]:
    """Tell on stderr each phase of a start or a stop with its seconds; that it goes on is seen meanwhile."""
    console = Console(stderr=True)
    tell = tell_phases(lambda line: click.echo(line, err=True))
    if console.is_terminal:
        with console.status("starting") as status:

            def on_phase(phase: str) -> None:
                tell(phase)
                status.update(phase)

            yield on_phase
        return
    with _ticking(tell) as ticked:
        yield ticked


@contextlib.contextmanager
def _ticking(tell: OnPhase) -> Iterator[OnPhase]:
    """Repeat the last phase where none follows for `SILENCE_S`."""
    told, ended, last = threading.Event(), threading.Event(), ""

    def on_phase(phase: str) -> None:
        nonlocal last
        last = phase
        tell(phase)
        told.set()

    def tick() -> None:
        while not ended.is_set():
            if told.wait(SILENCE_S):
                told.clear()
            elif last:
                tell(f"… {last}")

    thread = threading.Thread(target=tick, name="ticking", daemon=True)
    thread.start()
    try:
        yield on_phase
    finally:
        ended.set()
        told.set()
        thread.join()
