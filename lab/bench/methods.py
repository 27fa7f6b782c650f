"""`outrider bench methods`: every drafting method beside plain decoding, where its steps' time goes, and the bound.

speed ÷ off     tokens/s over plain decoding's. A batch decodes in blocks of steps, in turn without drafts (off), with
                drafts in every step (always) and as the price of each step has it (priced): all meet the same moments
                of the machine. Steps that read prompts do not count. Where one thread computes, seconds are its
                processor's, so that what else the machine does is left out
drafting, ...   shares of a step with drafts in every step. Drafting: the drafter in the verifier's process; waiting:
                for one in a process of its own; verification: the target's forward; sampling: which tokens stand and
                which one follows; host: the rest, scheduling, committing and asking
tokens          committed by a verification, on the way through what was recorded: drafts of every position, 48 of each
                prompt, greedily
accepted at i   verifications that accept at least i tokens / all
drafted, empty  tokens of a draft; verifications without a draft / all
bound           the same batches played with what was recorded at every position: the best method and length by
                hindsight (lab/replay/hindsight.py), with the steps and drafts of this run

Nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.extras import require_extra
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import numbers, show_progress
from outrider.lab.report import Column, definitions_of, describe_machine, files, markdown_of, number, show_page, write

if TYPE_CHECKING:
    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.lab.bench.method_figures import MethodsResult, Row
    from outrider.lab.replay.hindsight import Bound
    from outrider.lab.replay.machine import Walk

PLAIN_WIDTH = 180
EMBEDDED_INFLATE_TO = 100e6
TINY = {"concurrencies": (1, 2), "num_prompts": 2, "num_steps": 4, "inflate": 0.0}


def _names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(value.split(","))


def _folders(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    """Read METHOD=FOLDER, each."""
    parted = [value.partition("=") for value in values]
    if any(not (method and folder and Path(folder).is_dir()) for method, _, folder in parted):
        raise click.BadParameter("expected METHOD=FOLDER, a folder that exists")
    return {method: Path(folder) for method, _, folder in parted}


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", required=False)
@click.option(
    "--methods",
    callback=_names,
    help="With commas between them; METHOD+tree drafts trees. Default: all that need no checkpoint or have one.",
)
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    callback=_folders,
    metavar="METHOD=FOLDER",
    help="The draft model or head of a method; may be given several times. Default: those shipped for MODEL.",
)
@click.option(
    "--traces",
    "traces_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Instead of a model: recorded requests (JSONL), their bound with an H100's published times.",
)
@click.option("--far", "is_far", is_flag=True, help="Draft in a process of its own, on the last core; without a bound.")
@click.option("--concurrency", "concurrencies", default="1,4,16,64,128", show_default=True, callback=numbers)
@click.option("--num-speculative-tokens", type=click.IntRange(1), default=4, show_default=True, help="Longest draft.")
@click.option("--num-tree-nodes", type=click.IntRange(1), default=8, show_default=True, help="Tokens of a draft tree.")
@click.option(
    "--inflate",
    type=click.FloatRange(min=0),
    help="Widen the target to so many parameters, outputs unchanged; 0: as it is. "
    "Default: 100e6 for the embedded target, 0 for MODEL.",
)
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", show_default=True)
@click.option("--num-prompts", type=click.IntRange(1, 64), default=8, show_default=True, help="At each concurrency.")
@click.option(
    "--steps", "num_steps", type=click.IntRange(4), default=16, show_default=True, help="Of a mode and batch."
)
@click.option("--tiny", "is_tiny", is_flag=True, help="A few steps of two small batches, to see that it runs.")
@files("json", "markdown", "plot")
def methods(
    json_file: Path | None, markdown_file: Path | None, plot_file: Path | None, is_tiny: bool, **given: Any
) -> None:
    """Measure every drafting method: speed, where the time goes, acceptance, and what the best choice would bring."""
    from outrider.lab.bench.arms import BenchError
    from outrider.lab.same_tokens import require_same

    given |= TINY if is_tiny else {}
    if plot_file is not None:
        require_extra("plots", "--plot")
    try:
        if (traces_file := given.pop("traces_file")) is not None:
            page = _page_of_traces(traces_file, given["concurrencies"], given["num_speculative_tokens"])
            show_page(page, PLAIN_WIDTH, markdown_file)
            return
        result = _measured(**given)
    except (BenchError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    show_page(page_of(result, given["num_speculative_tokens"]), PLAIN_WIDTH, markdown_file)
    write(json_file, lambda: document_of(result))
    if plot_file is not None:
        from outrider.lab.bench.method_figures import plot

        plot(result, plot_file)
    require_same(result.tally)


def _measured(*, methods: tuple[str, ...] | None, num_tree_nodes: int, is_far: bool, **given: Any) -> MethodsResult:
    from outrider.lab.bench.method_arms import known_checkpoints, method_configs
    from outrider.lab.bench.method_figures import measure

    checkpoints = known_checkpoints(given["model"], given.pop("checkpoints"))
    sizes = {"concurrencies": given["concurrencies"], "num_steps": given.pop("num_steps")}
    with _base(**given) as (base, prompts):
        configs = method_configs(methods, base, checkpoints, num_tree_nodes=num_tree_nodes, is_far=is_far)
        with show_progress(len(configs) * (1 + len(sizes["concurrencies"]))) as on_run:
            return measure(
                configs,
                prompts,
                **sizes,
                is_far=is_far,
                machine=describe_machine(),
                clock=_clock(is_far),
                on_run=on_run,
            )


def _clock(is_far: bool) -> Callable[[], float]:
    """Return the processor's time of this thread where it alone computes, so that other work of the machine is out."""
    is_alone = not is_far and len(os.sched_getaffinity(0)) <= 2  # the target has all cores but the last
    return time.thread_time if is_alone else time.perf_counter


@contextlib.contextmanager
def _base(
    *,
    model: str | None,
    concurrencies: Sequence[int],
    num_speculative_tokens: int,
    inflate: float | None,
    dtype: str,
    num_prompts: int,
) -> Iterator[tuple[ServiceConfig, list[tuple[int, ...]]]]:
    """Settle the target and its prompts; an inflated one is there until the end."""
    from outrider.cluster.config.known_models import is_embedded
    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.lab.bench.inflate import inflate as write_inflated
    from outrider.lab.bench.pairs import read_prompts
    from outrider.lab.chat_prompts import encoded_prompts
    from outrider.verifier_service.model.architectures import resolve_folder

    config = ServiceConfig(
        model=model,
        num_speculative_tokens=num_speculative_tokens,
        dtype=dtype,
        max_num_seqs=max(*concurrencies, num_prompts),
        seed=0,
    )
    target = config.verifier_spec.model
    prompts = [*read_prompts(config, None)] if is_embedded(model) else encoded_prompts(target)
    inflate_to = inflate if inflate is not None else (EMBEDDED_INFLATE_TO if is_embedded(model) else 0)
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        if inflate_to:
            write_inflated(resolve_folder(target), Path(folder), int(inflate_to))
            config = config.with_options(model=folder)
        yield config, prompts[:num_prompts]


# --- the page ---


def page_of(result: MethodsResult, num_positions: int) -> str:
    """Write a table of the methods at each number of requests, and the bound."""
    rows = sorted(result.rows, key=lambda row: row.num_requests)
    parts = [f"{result.title}; {result.machine}.", "\n".join(markdown_of(columns_of(), rows))]
    parts += ["**Acceptance**", _walks(result.walks, num_positions)]
    if result.bounds:
        parts += ["**The bound**", _bounds(result.bounds, result.rows)]
    parts += [
        f"Tokens beside plain decoding's: {result.tally}.",
        f"```\n{definitions_of(__doc__).rpartition(chr(10) * 2)[0]}\n```",
    ]
    return "\n\n".join(parts)


def _page_of_traces(path: Path, concurrencies: Sequence[int], length: int) -> str:
    """Write what recorded requests would have accepted, and the bound on the machine that recorded them."""
    from outrider.lab.replay.hindsight import Hindsight
    from outrider.lab.replay.machine import MachineFit, PublishedMachine, Walk, recorded_drafts

    recorded, context = recorded_drafts(path, length)
    hindsight = Hindsight(recorded, PublishedMachine(context, MachineFit()), length)
    walks = [Walk.of(name, requests) for name, requests in recorded.items()]
    bounds = [hindsight.bound(count) for count in concurrencies]
    return "\n\n".join([path.name, _walks(walks, length), _bounds(bounds)])


def _walks(walks: Sequence[Walk], num_positions: int) -> str:
    positions = ", ".join(str(at + 1) for at in range(num_positions))
    columns = [
        Column[Any]("method", lambda walk: walk.name),
        Column("tokens", lambda walk: f"{walk.num_tokens / walk.num_rounds:.2f}"),
        Column(
            f"accepted at {positions} (%)",
            lambda walk: _percent(walk.by_position(num_positions)),
        ),
        Column("drafted", lambda walk: number(walk.num_draft_tokens / max(1, walk.num_drafts), 1)),
        Column("empty", lambda walk: number(1 - walk.num_drafts / walk.num_rounds, 0, 100, " %")),
    ]
    return "\n".join(markdown_of(columns, walks))


def document_of(result: MethodsResult) -> dict[str, Any]:
    """Return the page's cells for programs."""
    columns = columns_of()
    rows = [{column.heading: column.cell(row) for column in columns} for row in result.rows]
    return {"machine": str(result.machine), "rows": rows, "bounds": [asdict(bound) for bound in result.bounds]}


def _percent(shares: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in shares)


def columns_of() -> list[Column[Row]]:
    """Return the columns of a table of methods at their loads."""
    from outrider.lab.bench.method_arms import Mode
    from outrider.lab.bench.method_figures import SHARES

    def share(name: str) -> Column[Row]:
        return Column(f"{name} %", lambda row: number(row.share(name), 0, 100))

    return [
        Column("method", lambda row: row.name),
        Column("requests", lambda row: str(row.num_requests)),
        Column("off, tokens/s", lambda row: number(row.steps[Mode.OFF].tokens_per_s, 1)),
        Column("always ÷ off", lambda row: number(row.ratio(Mode.ALWAYS), 2)),
        Column("priced ÷ off", lambda row: number(row.ratio(Mode.PRICED), 2)),
        Column("ms a step", lambda row: number(row.step_s, 1, 1e3)),
        *(share(name) for name in SHARES),
        Column("tokens a step", lambda row: number(row.tokens_per_round, 2)),
    ]


def _bounds(bounds: Sequence[Bound], rows: Sequence[Row] = ()) -> str:
    from outrider.lab.bench.method_arms import Mode
    from outrider.lab.bench.method_figures import best_of

    columns = [Column[Any]("requests", lambda bound: str(bound.num_requests))]
    if rows:
        columns += [
            Column("measured: always", lambda bound: best_of(rows, bound.num_requests, Mode.ALWAYS)),
            Column("measured: priced", lambda bound: best_of(rows, bound.num_requests, Mode.PRICED)),
        ]
    columns += [
        Column("fixed", lambda bound: f"{bound.fixed:.2f} ({bound.fixed_name})"),
        Column("per request", lambda bound: f"{bound.per_request:.2f}"),
        Column("one method", lambda bound: f"{bound.one_method:.2f}"),
        Column("per step", lambda bound: f"{bound.per_step:.2f}"),
    ]
    return "\n".join(markdown_of(columns, bounds))
