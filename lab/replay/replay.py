"""`outrider bench replay`: the model-free drafters over recorded requests, beside what was recorded.

The work is in traces.py; nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of
from outrider.lab.report import (
    Column,
    Machine,
    Report,
    Section,
    definitions_of,
    describe_machine,
    files,
    number,
    table_of,
    write,
)

if TYPE_CHECKING:
    from outrider.lab.replay.traces import Figures

PLAIN_WIDTH = 150  # columns of text where the output is no terminal


@dataclass(frozen=True, slots=True)
class DatasetResult:
    """The arms' figures on one file of requests, recorded ones first."""

    name: str
    num_requests: int
    num_tokens: int
    rows: list[tuple[str, Figures]]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("traces", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--num-speculative-tokens", type=click.IntRange(min=1), default=20, show_default=True, help="Longest draft."
)
@click.option("--max-nodes", type=click.IntRange(min=1), default=32, show_default=True, help="Tokens of a draft tree.")
@click.option("--num-requests", type=click.IntRange(min=1), help="The first of each file. Default: all.")
@files("markdown")
def replay(
    traces: tuple[Path, ...],
    num_speculative_tokens: int,
    max_nodes: int,
    num_requests: int | None,
    markdown_file: Path | None,
) -> None:
    """Replay the model-free drafters over recorded requests: acceptance and microseconds per draft.

    TRACES are JSONL files (.gz too): prompt_token_ids, generated_token_ids and, beside a recorded drafter's name,
    acc_NAME.acc_len: the tokens that one verification at each generated position committed.
    """
    import time

    from outrider.lab.replay.traces import TraceError

    machine, console = describe_machine(), console_of(PLAIN_WIDTH)
    results: list[DatasetResult] = []
    try:
        for path in traces:
            with _progress(path) as on_arm:
                results.append(
                    replay_file(path, num_requests, num_speculative_tokens, max_nodes, time.thread_time, on_arm)
                )
            console.print(table_of(COLUMNS, results[-1].rows, title(results[-1])))
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    write(None, dict, markdown_file, report_of(results, machine, num_speculative_tokens).to_markdown)


@contextmanager
def _progress(path: Path) -> Iterator[Callable[[str, float], None]]:
    """Show on stderr which arm runs; redrawn between arms only, so that it takes no time from them."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task(path.name, total=1.0)

        def on_arm(name: str, done: float) -> None:
            progress.update(task, completed=done, description=f"{path.name}: {name}", refresh=True)

        yield on_arm
        progress.update(task, completed=1.0, description=path.name, refresh=True)


def replay_file(
    path: Path,
    num_requests: int | None,
    num_speculative_tokens: int,
    max_nodes: int,
    clock: Callable[[], float],
    on_arm: Callable[[str, float], None],
) -> DatasetResult:
    """Replay every arm over one file; `on_arm` hears which comes next and which share is done."""
    from outrider.lab.replay.traces import arms, read_traces, recorded_figures, replay_arm

    traces = read_traces(path, num_requests)
    names = dict.fromkeys(name for trace in traces for name in trace.recorded)
    rows = [(f"recorded: {name}", recorded_figures(traces, name)) for name in names]
    todo = arms(max_nodes)
    for place, arm in enumerate(todo):
        on_arm(arm.name, place / len(todo))
        rows.append((arm.name, replay_arm(arm, traces, num_speculative_tokens=num_speculative_tokens, clock=clock)))
    return DatasetResult(
        name=path.name.partition(".")[0],
        num_requests=len(traces),
        num_tokens=sum(len(trace.generated_ids) for trace in traces),
        rows=rows,
    )


# --- the report ---


def _microseconds(value_s: float | None) -> str:
    return number(value_s, 1, 1e6)


Row = tuple[str, "Figures"]
COLUMNS = (
    Column[Row]("drafter", lambda row: row[0]),
    Column[Row]("accept. length", lambda row: f"{row[1].mean_acceptance_length:.3f}"),
    Column[Row](
        "accepted at 1, 2, 3, 4, 5, 6 (%)",
        lambda row: " ".join(f"{share * 100:4.1f}" for share in row[1].acceptance_by_position),
    ),
    Column[Row]("drafted", lambda row: number(row[1].drafted, 2)),
    Column[Row]("empty", lambda row: number(row[1].empty, 0, 100, "%")),
    Column[Row]("µs per draft p50", lambda row: _microseconds(row[1].draft_p50_s)),
    Column[Row]("p99", lambda row: _microseconds(row[1].draft_p99_s)),
    Column[Row]("µs per prompt token", lambda row: _microseconds(row[1].prompt_token_s)),
)


def title(result: DatasetResult) -> str:
    return f"{result.name}: {result.num_requests} requests, {result.num_tokens} generated tokens"


def report_of(results: list[DatasetResult], machine: Machine, num_speculative_tokens: int) -> Report[Row]:
    """Return all datasets' figures as a page."""
    from outrider.lab.replay import traces as trace_replay

    return Report(
        title=(
            f"{machine}. One request at a time, in the order of the file, drafts of at most "
            f"{num_speculative_tokens} tokens."
        ),
        columns=COLUMNS,
        sections=[Section(title(result), result.rows) for result in results],
        heading="Replay of the model-free drafters",
        command="outrider bench replay",
        definitions=definitions_of(trace_replay.__doc__),
    )
