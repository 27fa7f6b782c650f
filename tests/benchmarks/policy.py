"""`make study NAME=policy`: how much to draft, decided in several ways, over recorded acceptance.

The work is in draft_lengths/: replay.py (virtual time), arms.py and adaptive.py (the policies) and table.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click

from benchmarks.draft_lengths import replay as policy_replay
from benchmarks.draft_lengths import table as policy_table
from benchmarks.draft_lengths.table import MIN_OF_ORACLE, MIN_OF_TABLE, Point, count_points, run_table
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.lab.replay.machine import MachineFit
from outrider.lab.replay.traces import TraceError, read_traces
from outrider.lab.report import Column, Report, Section, files

PLAIN_WIDTH = 180  # columns of text where the output is no terminal
BATCH_SIZES = "1,2,4,8,16,32,64,128,256"
SUFFIXES = (".jsonl", ".jsonl.gz")


def _batch_sizes(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter("expected integers with commas between them") from error
    if min(sizes) < 1:
        raise click.BadParameter("a batch has at least one request")
    return sizes


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("traces_folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--batch-sizes", default=BATCH_SIZES, show_default=True, callback=_batch_sizes)
@click.option(
    "--num-tokens",
    "min_tokens",
    type=click.IntRange(min=1),
    default=20_000,
    show_default=True,
    help="Committed in one replay, at least; large batches play more.",
)
@click.option(
    "--repeats",
    "num_repeats",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Replay with the requests in so many orders: the means, and how far adaptive over the table is certain.",
)
@files("json", "markdown")
def policy(
    traces_folder: Path,
    batch_sizes: tuple[int, ...],
    min_tokens: int,
    num_repeats: int,
    json_file: Path | None,
    markdown_file: Path | None,
) -> None:
    """Compare draft-length policies over recorded acceptance, in virtual time: throughput by batch size.

    TRACES_FOLDER holds JSONL files (.gz too): prompt_token_ids, generated_token_ids, and acc_eagle.acc_len and
    acc_ngram.acc_len: the tokens that one verification at each generated position committed.
    """
    found = sorted(path for path in traces_folder.iterdir() if path.name.endswith(SUFFIXES))
    if not found:
        raise click.UsageError(f"{traces_folder} holds no .jsonl or .jsonl.gz file")
    try:
        datasets = [(path.name.partition(".")[0], read_traces(path)) for path in found]
    except TraceError as error:
        raise click.ClickException(str(error)) from error
    machine = MachineFit()
    with _progress(count_points(datasets, batch_sizes)) as on_point:
        points = run_table(
            datasets,
            batch_sizes,
            machine=machine,
            min_tokens=min_tokens,
            num_repeats=num_repeats,
            on_point=on_point,
        )
    report_of(points, machine).show(PLAIN_WIDTH, json_file, markdown_file)


@contextmanager
def _progress(num_points: int) -> Iterator[Callable[[Point], None]]:
    """Show on stderr how many points are done."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=num_points)
        yield lambda point: progress.update(task, advance=1, description=f"{point.dataset}, {point.drafter}")


# --- the report ---


def _of_table(point: Point, *, digits: int) -> str:
    error = f" ± {point.of_table_error:.{digits}f}" if point.of_table_error else ""
    return f"{point.of_table:.{digits}f}{error}"


def _fixed(length: int) -> Column[Point]:
    return Column(f"K = {length}", lambda point: f"{point.fixed[length - 1]:.3f}")


COLUMNS = (
    Column[Point]("batch", lambda point: str(point.batch_size)),
    Column[Point]("off, tokens/s", lambda point: f"{point.off_throughput:.0f}"),
    *(_fixed(length) for length in (1, 2, 4, 8)),
    Column[Point]("table (K)", lambda point: f"{point.table:.3f} ({point.table_length})"),
    Column[Point]("adaptive", lambda point: f"{point.adaptive:.3f}"),
    Column[Point]("oracle", lambda point: f"{point.oracle:.3f}"),
    Column[Point]("clairvoyant", lambda point: f"{point.clairvoyant:.3f}"),
    Column[Point]("mean draft", lambda point: f"{point.adaptive_length:.2f}"),
    Column[Point]("oracle's", lambda point: f"{point.oracle_length:.2f}"),
    Column[Point]("of oracle", lambda point: f"{point.of_oracle:.3f}"),
    Column[Point]("of table", lambda point: _of_table(point, digits=3)),
)


def verdict(points: Sequence[Point]) -> str:
    """Say at how many points adaptive is what it has to be, and where it is not."""
    missed = [point for point in points if not point.is_met]
    lines = [
        f"Adaptive is at least {MIN_OF_ORACLE} of the oracle and {MIN_OF_TABLE} of the table at "
        f"{len(points) - len(missed)} of {len(points)} points, within two standard errors at "
        f"{sum(point.is_met_but_for_noise for point in points)}; least of the oracle "
        f"{min(point.of_oracle for point in points):.3f}, least of the table "
        f"{min(point.of_table for point in points):.3f}, least of off {min(point.adaptive for point in points):.3f}."
    ]
    lines += [
        f"- {'within two standard errors' if point.is_met_but_for_noise else 'not'} "
        f"at {point.dataset}, {point.drafter}, batch {point.batch_size}: {point.of_oracle:.4f} of the oracle, "
        f"{_of_table(point, digits=5)} of the table (K = {point.table_length})"
        for point in missed
    ]
    return "\n".join(lines)


def report_of(points: Sequence[Point], machine: MachineFit) -> Report[Point]:
    """Return what was replayed, a table per dataset and drafter, and what the names mean."""
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(f"{point.dataset}, {point.drafter}", []).append(point)
    explained = [inspect.cleandoc(thing.__doc__ or "") for thing in (policy_table, policy_replay, machine)]
    figures = ("table", "table_length", "of_oracle", "of_table")
    return Report(
        title="in virtual time, so the figures are the same on any machine.",
        columns=COLUMNS,
        sections=[Section(title, group) for title, group in groups.items()],
        notes=[verdict(points)],
        heading="How much to draft: policies over recorded acceptance",
        command="make study NAME=policy",
        definitions="\n\n".join(explained) + f"\nHere: knee at {machine.knee:.0f} tokens.",
        document={
            "machine": asdict(machine) | {"knee": machine.knee},
            "points": [asdict(point) | {name: getattr(point, name) for name in figures} for point in points],
        },
    )
