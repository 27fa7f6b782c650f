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
from outrider.cluster.common.terminal import NOTHING, console_of, markdown_table

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.lab.bench.figures import Machine
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
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
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

    from outrider.lab.bench.pairs import describe_machine
    from outrider.lab.replay.traces import TraceError

    machine = describe_machine()
    console = console_of(PLAIN_WIDTH)
    results: list[DatasetResult] = []
    try:
        for path in traces:
            with _progress(path) as on_arm:
                results.append(
                    replay_file(path, num_requests, num_speculative_tokens, max_nodes, time.thread_time, on_arm)
                )
            console.print(to_table(results[-1]))
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    if markdown_file is not None:
        markdown_file.write_text(to_markdown(results, machine, num_speculative_tokens))


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
    for number, arm in enumerate(todo):
        on_arm(arm.name, number / len(todo))
        rows.append((arm.name, replay_arm(arm, traces, num_speculative_tokens=num_speculative_tokens, clock=clock)))
    return DatasetResult(
        name=path.name.partition(".")[0],
        num_requests=len(traces),
        num_tokens=sum(len(trace.generated_ids) for trace in traces),
        rows=rows,
    )


# --- the report ---

HEADINGS = (
    "drafter",
    "accept. length",
    "accepted at 1, 2, 3, 4, 5, 6 (%)",
    "drafted",
    "empty",
    "µs per draft p50",
    "p99",
    "µs per prompt token",
)


def cells(name: str, figures: Figures) -> list[str]:
    """Write one row under `HEADINGS`."""
    return [
        name,
        f"{figures.mean_acceptance_length:.3f}",
        " ".join(f"{share * 100:4.1f}" for share in figures.acceptance_by_position),
        _number(figures.drafted, "{:.2f}"),
        _number(figures.empty, "{:.0%}"),
        _microseconds(figures.draft_p50_s),
        _microseconds(figures.draft_p99_s),
        _microseconds(figures.prompt_token_s),
    ]


def _number(value: float | None, form: str) -> str:
    return NOTHING if value is None else form.format(value)


def _microseconds(value_s: float | None) -> str:
    return NOTHING if value_s is None else f"{value_s * 1e6:.1f}"


def title(result: DatasetResult) -> str:
    return f"{result.name}: {result.num_requests} requests, {result.num_tokens} generated tokens"


def to_table(result: DatasetResult) -> Table:
    """Draw a dataset's figures for a terminal."""
    from rich.table import Table

    table = Table(title=title(result), title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right")
    for name, figures in result.rows:
        table.add_row(*cells(name, figures))
    return table


def to_markdown(results: list[DatasetResult], machine: Machine, num_speculative_tokens: int) -> str:
    """Write a page: the machine, a table per dataset, and what the names mean."""
    from outrider.lab.replay import traces as trace_replay

    lines = [
        "# Replay of the model-free drafters",
        "",
        f"`outrider bench replay`: {machine}. One request at a time, in the order "
        f"of the file, drafts of at most {num_speculative_tokens} tokens.",
        "",
    ]
    for result in results:
        rows = (cells(name, figures) for name, figures in result.rows)
        lines += [f"**{title(result)}**", "", *markdown_table(HEADINGS, rows, num_left=1), ""]
    lines += ["```", (trace_replay.__doc__ or "").partition("\n\n")[2].strip(), "```"]
    return "\n".join(lines) + "\n"
