"""`outrider bench latency` and `outrider bench throughput`: options in, table and files out.

Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from outrider.cluster.bench import BenchOptions
    from outrider.cluster.bench_report import Column

PLAIN_WIDTH = 140  # columns of text where the output is no terminal
EMBEDDED_INFLATE_TO = 100e6

_COMMON_OPTIONS = (
    click.argument("model", required=False),
    click.option("--draft-model", help="Folder or hub id of the draft model. Default: the embedded pair's."),
    click.option(
        "--prompts",
        "prompts_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSONL: prompt or prompt_token_ids per line. Default: the embedded pair's held-out prompts.",
    ),
    click.option("--num-speculative-tokens", type=int, default=4, show_default=True, help="Longest draft."),
    click.option("--temperature", type=float, default=0.0, show_default=True),
    click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens of every prompt, exactly."),
    click.option("--num-prompts", type=click.IntRange(min=1), default=16, show_default=True, help="The first of them."),
    click.option("--peers/--no-peers", default=True, show_default=True, help="Measure transformers as well."),
    click.option(
        "--inflate",
        type=click.FloatRange(min=0),
        help="Parameters of the target in a second pair of equal outputs; 0: none. "
        "Default: 100e6 for the embedded pair, 0 for MODEL.",
    ),
    click.option("--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path)),
    click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path)),
)


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that both verbs have."""
    for option in reversed(_COMMON_OPTIONS):
        command = option(command)
    return command


def _concurrencies(_: click.Context, __: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter("expected numbers with commas between them") from error


CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


@click.group(context_settings=CONTEXT_SETTINGS)
def bench() -> None:
    """Measure Outrider beside transformers: same prompts, one run, no server."""


@bench.command()
@common_options
@click.option("--repeats", type=int, default=5, show_default=True, help="Figures are their medians.")
def latency(**options: Any) -> None:
    """Time one request at a time: first token, inter-token, then speed."""
    from outrider.cluster.bench_report import LATENCY_COLUMNS

    _run(LATENCY_COLUMNS, concurrencies=(1,), **options)


@bench.command()
@common_options
@click.option(
    "--concurrency",
    "concurrencies",
    default="1,4,16",
    show_default=True,
    callback=_concurrencies,
    help="How many requests at a time.",
)
@click.option("--repeats", type=int, default=3, show_default=True, help="Figures are their medians.")
def throughput(**options: Any) -> None:
    """Measure tokens per second at several concurrencies."""
    from outrider.cluster.bench_report import THROUGHPUT_COLUMNS

    _run(THROUGHPUT_COLUMNS, **options)


def _run(columns: Sequence[Column], *, json_file: Path | None, markdown_file: Path | None, **options: Any) -> None:
    from rich.console import Console

    from outrider.cluster.bench import pairs, run_bench
    from outrider.cluster.bench_arms import BenchError
    from outrider.cluster.bench_report import to_json, to_markdown, to_table

    with contextlib.ExitStack() as stack:
        with _usage_errors():
            bench_options = _parse(**options)
            named_pairs = stack.enter_context(pairs(bench_options))
        clock, on_run = stack.enter_context(_progress(bench_options.num_runs))
        try:
            result = run_bench(bench_options, named_pairs, clock=clock, on_run=on_run)
        except BenchError as error:
            raise click.ClickException(str(error)) from error
    console = Console()
    if not console.is_terminal:
        console = Console(width=PLAIN_WIDTH)
    console.print(to_table(result, columns))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(result), indent=2) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(to_markdown(result, columns))


@contextlib.contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _parse(
    *,
    model: str | None,
    draft_model: str | None,
    prompts_file: Path | None,
    num_speculative_tokens: int,
    temperature: float,
    max_tokens: int,
    num_prompts: int,
    peers: bool,
    inflate: float | None,
    concurrencies: tuple[int, ...],
    repeats: int,
) -> BenchOptions:
    from outrider.cluster.bench import BenchOptions, read_prompts
    from outrider.cluster.bench_figures import Workload
    from outrider.cluster.config import ServiceConfig

    config = ServiceConfig(model=model, draft_model=draft_model, num_speculative_tokens=num_speculative_tokens, seed=0)
    inflate_to = inflate if inflate is not None else (0 if model else EMBEDDED_INFLATE_TO)
    return BenchOptions(
        config=config,
        workload=Workload(
            prompts=read_prompts(config, prompts_file)[:num_prompts],
            max_tokens=max_tokens,
            temperature=temperature,
            num_speculative_tokens=num_speculative_tokens,
        ),
        concurrencies=concurrencies,
        repeats=repeats,
        with_peers=peers,
        inflate_to=int(inflate_to),
    )


@contextlib.contextmanager
def _progress(num_runs: int) -> Iterator[tuple[Callable[[], float], Callable[[str], None]]]:
    """Show on stderr what is being measured; yields the clock to measure with and a listener for the next run."""
    import time

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights: it would draw over ours
    logging.set_verbosity_error()  # assisted generation warns of its own call of `generate`
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    # redrawn between runs only: a thread that draws during a run would take time from what is measured
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("loading", total=num_runs)
        started: list[str] = []

        def on_run(description: str) -> None:
            progress.update(task, completed=len(started), description=description, refresh=True)
            started.append(description)

        yield time.perf_counter, on_run
        progress.update(task, completed=len(started), description="done", refresh=True)
