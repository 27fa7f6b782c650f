"""The verbs of `outrider bench`: options in, table and files out.

Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.cli.usage import PLAIN_WIDTH, usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS, server_options
from outrider.cluster.common.terminal import console_of, parse_numbers, show_progress
from outrider.lab.bench.gpu import gpu
from outrider.lab.bench.methods import methods
from outrider.lab.bench.profile import profile
from outrider.lab.gateway.verb import gateway
from outrider.lab.peers.verb import peers as peers_verb
from outrider.lab.report import files, write

if TYPE_CHECKING:
    from outrider.lab.bench.figures import BenchResult, Row
    from outrider.lab.bench.load import LoadPoint
    from outrider.lab.bench.pairs import BenchOptions
    from outrider.lab.bench.serve import ServeBenchOptions
    from outrider.lab.report import Column

SERVE_PLAIN_WIDTH = 180
EMBEDDED_INFLATE_TO = 100e6
DEFAULT_CONCURRENCIES = (1, 4, 16)
# most were verbs of this group
STUDIES = (
    *("adaptive", "agents", "device", "drift", "exact", "far", "invariance", "policy", "pricing"),
    *("router", "step", "usual"),
)

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
    files("json", "markdown"),
)


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that both verbs have."""
    for option in reversed(_COMMON_OPTIONS):
        command = option(command)
    return command


def _concurrencies(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(parse_numbers(value, int))


def _rates(_: click.Context, __: click.Parameter, value: str | None) -> tuple[float, ...] | None:
    return None if value is None else tuple(parse_numbers(value, float))


class BenchGroup(click.Group):
    """The verbs that users run; those that became developers' studies say where they are."""

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if arguments and arguments[0] in STUDIES:
            raise click.UsageError(
                f"{arguments[0]!r} is a study for developers: in a checkout, `make study NAME={arguments[0]}`", context
            )
        return super().resolve_command(context, arguments)


@click.group(cls=BenchGroup, context_settings=CONTEXT_SETTINGS)
def bench() -> None:
    """Measure: latency and throughput beside transformers, without a server; serve: a running server under load.

    peers: our engine beside others, each in an environment of its own, which `make peers` makes.

    gateway: what a served token costs outside the model, by process.

    profile: where a step of our engine spends its time; gpu: what one accelerator gives.

    methods: every drafting method beside plain decoding, and what the best choice would bring.
    """


bench.add_command(gateway)
bench.add_command(gpu)
bench.add_command(methods)
bench.add_command(peers_verb)
bench.add_command(profile)


@bench.command()
@common_options
@click.option("--repeats", type=int, default=5, show_default=True, help="Figures are their medians.")
def latency(**options: Any) -> None:
    """Time one request at a time: first token, inter-token, then speed."""
    from outrider.lab.bench.report import LATENCY_COLUMNS

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
    from outrider.lab.bench.report import THROUGHPUT_COLUMNS

    _run(THROUGHPUT_COLUMNS, **options)


def _run(columns: Sequence[Column[Row]], *, json_file: Path | None, markdown_file: Path | None, **options: Any) -> None:
    from outrider.lab.bench.arms import BenchError
    from outrider.lab.bench.pairs import pairs, run_bench

    with contextlib.ExitStack() as stack:
        with usage_errors():
            bench_options = _parse(**options)
            named_pairs = stack.enter_context(pairs(bench_options))
        clock, on_run = stack.enter_context(_progress(bench_options.num_runs))
        try:
            result = run_bench(bench_options, named_pairs, clock=clock, on_run=on_run)
        except BenchError as error:
            raise click.ClickException(str(error)) from error
    report(result, columns, json_file, markdown_file)


def report(
    result: BenchResult, columns: Sequence[Column[Row]], json_file: Path | None, markdown_file: Path | None
) -> None:
    """Show a result and write it; raise `click.ClickException` where tokens are not plain decoding's."""
    from outrider.lab.bench.report import report_of
    from outrider.lab.same_tokens import require_same

    report_of(result, columns).show(PLAIN_WIDTH, json_file, markdown_file)
    require_same(*result.tallies)


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
    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.lab.bench.figures import Workload
    from outrider.lab.bench.pairs import BenchOptions, read_prompts

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

    from transformers.utils import logging

    logging.set_verbosity_error()  # assisted generation warns of its own call of `generate`
    with show_progress(num_runs) as on_run:
        yield time.perf_counter, on_run


# --- serve ---

_SERVE_OPTIONS = (
    click.option("--model", help="Default: the first that the server lists."),
    click.option(
        "--concurrency",
        "--max-concurrency",
        "concurrencies",
        callback=_concurrencies,
        help="How many requests at a time: one number, or several with commas for a sweep. Default: 1,4,16.",
    ),
    click.option(
        "--request-rate",
        "request_rates",
        callback=_rates,
        help="Instead: requests per second of Poisson arrivals, one number or several; inf: all at once.",
    ),
    click.option(
        "--prompts",
        "prompts_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSONL: prompt or prompt_token_ids per line. Default: the embedded pair's held-out prompts.",
    ),
    click.option("--num-prompts", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Of a point."),
    click.option("--max-tokens", type=int, default=128, show_default=True, help="Of one request."),
    click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True),
    click.option("--ignore-eos", is_flag=True, help="Ask for exactly --max-tokens; not every server knows this."),
    click.option("--seed", type=int, default=0, show_default=True, help="Of the arrival times."),
    click.option("--slo-ttft-ms", type=float, help="Goodput: time to first token at most this."),
    click.option("--slo-itl-ms", type=float, help="Goodput: p99 of a request's inter-token gaps at most this."),
    click.option(
        "--max-seconds", type=float, default=300.0, show_default=True, help="Of a point; what is left then is an error."
    ),
    files("json", "plot"),
)


def _serve_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_SERVE_OPTIONS):
        command = option(command)
    return command


@bench.command()
@server_options
@_serve_options
def serve(
    url: str,
    api_key: str | None,
    ssl_ca_certs: Path | None,
    ssl_certfile: Path | None,
    ssl_keyfile: Path | None,
    json_file: Path | None,
    plot_file: Path | None,
    **options: Any,
) -> None:
    """Load any OpenAI-compatible server: throughput, goodput, latencies and errors at several loads."""
    import time

    from outrider.cluster.client.openai_client import Server, ServerError
    from outrider.cluster.common.extras import require_extra
    from outrider.lab.bench.serve import run
    from outrider.lab.bench.serve_report import to_json, to_table

    server = Server(
        url=url, api_key=api_key, ssl_ca_certs=ssl_ca_certs, ssl_certfile=ssl_certfile, ssl_keyfile=ssl_keyfile
    )
    with usage_errors():
        if plot_file is not None:
            require_extra("plots", "--plot")
        bench_options = _parse_serve(**options)
        with _serve_progress(len(bench_options.prompts)) as on_point:
            try:
                result = run(server, bench_options, clock=time.perf_counter, on_point=on_point)
            except ServerError as error:
                raise click.ClickException(str(error)) from error
    console_of(SERVE_PLAIN_WIDTH).print(to_table(result))
    write(json_file, lambda: to_json(result))
    if plot_file is not None:
        from outrider.lab.bench.serve_plot import plot

        plot(result, plot_file)
    if not any(figures.num_completed for figures in result.figures):
        raise click.ClickException("no request was completed")


def _parse_serve(
    *,
    concurrencies: tuple[int, ...] | None,
    request_rates: tuple[float, ...] | None,
    prompts_file: Path | None,
    num_prompts: int,
    slo_ttft_ms: float | None,
    slo_itl_ms: float | None,
    **options: Any,
) -> ServeBenchOptions:
    from outrider.lab.bench.load import LoadPoint
    from outrider.lab.bench.serve import ServeBenchOptions, read_prompts
    from outrider.lab.bench.serve_figures import Slo

    if concurrencies and request_rates:
        raise ValueError("give either --concurrency or --request-rate")
    points: list[LoadPoint] = [LoadPoint(request_rate=rate) for rate in request_rates or ()]
    if not points:
        points = [LoadPoint(concurrency=number) for number in concurrencies or DEFAULT_CONCURRENCIES]
    return ServeBenchOptions(
        prompts=read_prompts(prompts_file, num_prompts),
        points=tuple(points),
        slo=Slo(
            ttft_s=None if slo_ttft_ms is None else slo_ttft_ms / 1e3,
            itl_s=None if slo_itl_ms is None else slo_itl_ms / 1e3,
        ),
        **options,
    )


@contextlib.contextmanager
def _serve_progress(num_requests: int) -> Iterator[Callable[[LoadPoint], Callable[[], None]]]:
    """Show on stderr how many replies each point has had."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as progress:

        def on_point(point: LoadPoint) -> Callable[[], None]:
            task = progress.add_task(f"load {point.value}", total=num_requests)
            return lambda: progress.advance(task)

        yield on_point
