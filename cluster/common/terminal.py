"""What commands share: numbers in options, the console, progress, tables as Markdown.

Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

NOTHING = "-"  # in a cell of a table: there is no such figure
PLAIN_INTERVAL_S = 20.0  # between lines on long work, where no terminal shows a bar
OnWork = Callable[[float, str], None]  # how much is done, and a word on where it stands
NumberT = TypeVar("NumberT", int, float)


def parse_numbers(text: str, kind: Callable[[str], NumberT]) -> list[NumberT]:
    """Read numbers with commas between them; raises `click.BadParameter`."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter("expected numbers with commas between them") from error


def numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """Read an option's whole numbers."""
    return tuple(parse_numbers(value, int))


def console_of(plain_width: int) -> Console:
    """Return a console of the terminal's width, or of so many columns where the output is no terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=plain_width)


@contextmanager
def show_progress(num_runs: int) -> Iterator[Callable[[str], None]]:
    """Show on stderr what is being measured; yields a listener for the next run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights: it would draw over ours
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # redrawn between runs only: a thread that draws during a run would take time from what is measured
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("loading", total=num_runs)
        started: list[str] = []

        def on_run(description: str) -> None:
            progress.update(task, completed=len(started), description=description, refresh=True)
            started.append(description)

        yield on_run
        progress.update(task, completed=len(started), description="done", refresh=True)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 0) -> list[str]:
    """Return the lines of a table whose first `num_left` columns are texts, the others figures."""
    rules = ["---" if column < num_left else "---:" for column in range(len(headings))]
    return [
        f"| {' | '.join(headings)} |",
        f"|{'|'.join(rules)}|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]


@contextmanager
def show_work(
    name: str, total: float | None, *, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[OnWork]:
    """Show on stderr how much of long work is done; yields a listener for the amount and a word on where it stands.

    `total` None: nobody knows how much there is.

    A terminal gets a bar. A log gets a line every `PLAIN_INTERVAL_S`.
    """
    from rich.console import Console

    console = console or Console(stderr=True)
    with _bar(console, name, total) if console.is_terminal else _lines(console, name, total, clock) as on_work:
        yield on_work


@contextmanager
def _bar(console: Console, name: str, total: float | None) -> Iterator[OnWork]:
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        *(
            TextColumn(name),
            BarColumn(),
            TaskProgressColumn(show_speed=True),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        ),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loading", total=total)
        most = math.inf if total is None else total
        yield lambda done, word: progress.update(task, completed=min(done, most), description=word)


@contextmanager
def _lines(console: Console, name: str, total: float | None, clock: Callable[[], float]) -> Iterator[OnWork]:
    begin_s = clock()
    last_s = begin_s - PLAIN_INTERVAL_S  # so that the first word is said

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True)

    def on_work(done: float, word: str) -> None:
        nonlocal last_s
        now_s = clock()
        if now_s - last_s >= PLAIN_INTERVAL_S:
            last_s = now_s
            share = "" if total is None else f"{min(1.0, done / total):.0%} in "
            say(f"{name}: {share}{(now_s - begin_s) / 60:.1f} min, {word}")

    say(f"{name}: loading")
    yield on_work
