"""`outrider bench drafters`: every drafter beside plain decoding, near and far, chains and trees, in one run.

near, far       in the verifier's process, in turns with the target; in a process of its own, on a core of its own
speed-up        tokens/s over plain decoding, measured beside the drafter in the same repeat; the target has the same
                cores in every arm, a far drafter's core comes on top
accept. length  1 + accepted / verifications with a draft
accepted at i   verifications that accept at least i draft tokens / verifications with a draft
drafted         draft tokens verified / verifications with a draft
empty           decode steps of a request that ran without a draft / all of them
B/token         encoded messages between verifier and drafter / committed tokens; the prompt is in there: its ids, and
                its hidden states where a drafter reads them all

Each repeat measures, for each method, plain decoding and then its arms: loaded, run at each concurrency after a
warm-up, and gone again. Nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import NOTHING, numbers, show_progress
from outrider.lab.report import Column, Report, definitions_of, describe_machine, files, number

if TYPE_CHECKING:
    from outrider.lab.bench.drafter_arms import BenchPlan
    from outrider.lab.bench.figures import BenchResult, Row

PLAIN_WIDTH = 180  # columns of text where the output is no terminal
EMBEDDED_INFLATE_TO = 100e6
STATES, FROM_DRAFTER = {"States"}, {"Draft", "Drafts", "Resync"}  # types of messages


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
    help="The draft model or head of a method; may be given several times. Default: those of the embedded target.",
)
@click.option("--concurrency", "concurrencies", default="1,8", show_default=True, callback=numbers)
@click.option("--num-speculative-tokens", type=click.IntRange(1), default=4, show_default=True, help="Longest draft.")
@click.option("--num-tree-nodes", type=click.IntRange(1), default=8, show_default=True, help="Tokens of a draft tree.")
@click.option(
    "--inflate",
    type=click.FloatRange(min=0),
    help="Widen the target to so many parameters, outputs unchanged; 0: as it is. "
    "Default: 100e6 for the embedded target, 0 for MODEL.",
)
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSONL: prompt or prompt_token_ids per line. Default: the embedded pair's held-out prompts.",
)
@click.option("--num-prompts", type=click.IntRange(min=1), default=8, show_default=True, help="The first of them.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Tokens of every prompt, exactly.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--repeats", type=int, default=2, show_default=True, help="Speeds are their medians.")
@files("json", "markdown")
def drafters(json_file: Path | None, markdown_file: Path | None, **given: Any) -> None:
    """Measure every drafter: acceptance by position, speed-up over plain decoding, bytes on the wire.

    Each runs in the verifier's process and, unless it reads the target's KV, in a process of its own.
    """
    from outrider.lab.bench.arms import BenchError
    from outrider.lab.bench.drafter_arms import measure
    from outrider.lab.same_tokens import require_same

    with ExitStack() as stack:
        try:
            plan = stack.enter_context(_planned(**given))
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        machine = describe_machine()
        on_run = stack.enter_context(show_progress(plan.num_runs))
        try:
            measurements = measure(plan, clock=time.perf_counter, on_run=on_run)
        except BenchError as error:
            raise click.ClickException(str(error)) from error
        result = plan.result_of(machine, measurements)
    report_of(result, plan.num_tree_nodes).show(PLAIN_WIDTH, json_file, markdown_file)
    require_same(*result.tallies)


@contextmanager
def _planned(
    *,
    model: str | None,
    methods: tuple[str, ...] | None,
    checkpoints: dict[str, Path],
    concurrencies: tuple[int, ...],
    num_speculative_tokens: int,
    num_tree_nodes: int,
    inflate: float | None,
    prompts_file: Path | None,
    num_prompts: int,
    max_tokens: int,
    temperature: float,
    repeats: int,
) -> Iterator[BenchPlan]:
    """Settle what is measured; an inflated target is there until the end. Raises `ValueError`."""
    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.lab.bench.drafter_arms import BenchPlan, arm_groups, known_checkpoints
    from outrider.lab.bench.figures import Workload
    from outrider.lab.bench.pairs import BenchOptions, pairs, read_prompts

    config = ServiceConfig(
        model=model, num_speculative_tokens=num_speculative_tokens, max_num_seqs=max(1, *concurrencies), seed=0
    )
    workload = Workload(
        prompts=read_prompts(config, prompts_file)[:num_prompts],
        max_tokens=max_tokens,
        temperature=temperature,
        num_speculative_tokens=num_speculative_tokens,
    )
    inflate_to = inflate if inflate is not None else (0 if model else EMBEDDED_INFLATE_TO)
    options = BenchOptions(
        config=config, workload=workload, concurrencies=concurrencies, repeats=repeats, inflate_to=int(inflate_to)
    )
    folders = known_checkpoints(model, checkpoints)
    with pairs(options) as named:
        pair, base = named[-1]
        yield BenchPlan(
            target=config.model.target_path,
            pair=pair,
            groups=arm_groups(methods, base, folders, num_tree_nodes),
            workload=workload,
            concurrencies=concurrencies,
            repeats=repeats,
            num_tree_nodes=num_tree_nodes,
        )


# --- the report ---


def report_of(result: BenchResult, num_tree_nodes: int) -> Report[Row]:
    """Return a result as it is shown."""
    from outrider.lab.bench.report import differences, document_of, sections_of

    workload = result.workload
    notes = [
        "The end-of-sequence token is ignored: every arm makes the same number of tokens. No prefix cache; what a "
        "drafter remembers of earlier responses begins anew in every run."
    ]
    if any(row.pair.startswith("target inflated") for row in result.rows):
        notes.append(
            "The inflated target computes the same function and the same hidden states at a larger price: acceptance "
            "is the small pair's own, the cost ratio of target and drafter is made."
        )
    counted = [{"drafts": counts_of(row), "bytes_per_token": bytes_per_token(row)} for row in result.rows]
    document = document_of(result)
    rows = [row | more for row, more in zip(document["rows"], counted, strict=True)]
    return Report(
        title=(
            f"{result.machine}. {len(workload.prompts)} prompts ({sum(map(len, workload.prompts))} tokens) x "
            f"{workload.max_tokens} tokens, temperature {workload.temperature:g}, drafts of "
            f"{workload.num_speculative_tokens}, trees of {num_tree_nodes}; speeds are medians of "
            f"{result.repeats} interleaved repeats."
        ),
        columns=columns_of(workload.num_speculative_tokens),
        sections=sections_of(result.rows),
        notes=[*notes, *differences(result, "plain decoding")],
        heading="Every drafter",
        command="outrider bench drafters",
        definitions=definitions_of(__doc__).rpartition("\n\n")[0],
        document={**document, "rows": rows, "num_tree_nodes": num_tree_nodes},
    )


def columns_of(num_positions: int) -> list[Column[Row]]:
    """Return the columns for drafts of so many tokens."""
    positions = ", ".join(str(position + 1) for position in range(num_positions))
    return [
        Column("drafter", lambda row: row.arm),
        Column("tokens/s", lambda row: number(row.figures.tokens_per_s, 1)),
        Column("speed-up", lambda row: number(row.ratio, 2)),
        Column("accept. length", lambda row: number(row.total.drafts.mean_acceptance_length, 2)),
        Column(f"accepted at {positions} (%)", lambda row: _shares(by_position(row, num_positions))),
        Column("drafted", lambda row: number(drafted(row), 1)),
        Column("empty", lambda row: number(empty(row), 0, 100, " %")),
        Column("B/token to drafter", lambda row: number(_sum(row, bytes_per_token(row).keys() - FROM_DRAFTER), 0)),
        Column("of them states", lambda row: number(_sum(row, bytes_per_token(row).keys() & STATES), 0)),
        Column("back", lambda row: number(_sum(row, bytes_per_token(row).keys() & FROM_DRAFTER), 0)),
    ]


def _shares(shares: Sequence[float]) -> str:
    return " ".join(f"{share * 100:.0f}" for share in shares) or NOTHING


def by_position(row: Row, num_positions: int) -> list[float]:
    """Return the share of a row's drafts of which so many tokens or more were accepted; [] without drafts."""
    counts = row.total.drafts
    found = counts.num_accepted_per_position  # no further than drafts went
    padded = [*found, *[0] * (num_positions - len(found))]
    return [accepted / counts.num_drafts for accepted in padded] if counts.num_drafts else []


def counts_of(row: Row) -> dict[str, Any]:
    counts = dataclasses.asdict(row.total.drafts)
    return {name: count for name, count in counts.items() if name.startswith("num_")}


def drafted(row: Row) -> float | None:
    counts = row.total.drafts
    return counts.num_draft_tokens / counts.num_drafts if counts.num_drafts else None


def empty(row: Row) -> float | None:
    counts = row.total.drafts
    num_rounds = counts.num_drafts + counts.num_empty_rounds
    return counts.num_empty_rounds / num_rounds if num_rounds else None


def bytes_per_token(row: Row) -> dict[str, float]:
    """Return the bytes on the wire by type of message; {} where nothing crosses one."""
    return {kind: size / row.total.num_tokens for kind, size in row.total.wire_bytes.items()}


def _sum(row: Row, kinds: Collection[str]) -> float | None:
    sizes = bytes_per_token(row)
    return sum(sizes[kind] for kind in kinds) if sizes else None
