"""Shared by commands: numbers in options, the console, progress, Markdown tables.

Heavy modules are imported only when a verb runs.
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

NOTHING = "-"  # a table's cell without a figure
PLAIN_INTERVAL_S = 20.0  # between progress lines, without a terminal
OnWork = Callable[[float, str], None]  # amount done, and a word on the state
NumberT = TypeVar("NumberT", int, float)


def parse_numbers(text: str, kind: Callable[[str], NumberT]) -> list[NumberT]:
    """Read comma-separated numbers; raises `click.BadParameter`."""
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise click.BadParameter("expected numbers with commas between them") from error


def numbers(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    """Read an option's whole numbers."""
    return tuple(parse_numbers(value, int))


def console_of(plain_width: int) -> Console:
    """Return a console of the terminal's width; without a terminal, of `plain_width` columns."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=plain_width)


@contextmanager
def show_progress(num_runs: int) -> Iterator[Callable[[str], None]]:
    """Show the progress of measurements on stderr; yields a function to call before each run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights: it would overwrite this one
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # redrawn between runs only: a drawing thread would disturb the measurement
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("loading", total=num_runs)
        started: list[str] = []

        def on_run(description: str) -> None:
            progress.update(task, completed=len(started), description=description, refresh=True)
            started.append(description)

        yield on_run
        progress.update(task, completed=len(started), description="done", refresh=True)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 0) -> list[str]:
    """Return a table's lines; the first `num_left` columns are texts, the others are figures."""
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
    """Show the progress of long work on stderr; yields a function of the amount done and a word on the state.

    `total` None: unknown. A terminal shows a bar; a log has a line every `PLAIN_INTERVAL_S`.
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
    last_s = begin_s - PLAIN_INTERVAL_S  # so that the first line is printed

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
