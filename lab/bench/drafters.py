"""`outrider bench drafters`: every drafter beside plain decoding, near and far, chains and trees, in one run.

    inflate the target
    for each repeat:                     every second one backwards, so that a drifting machine favours none
        for each method:
            plain decoding, then its arms: loaded, run at each concurrency after a warm-up, and gone again

Nothing heavy is imported before the verb runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, numbers, show_progress

if TYPE_CHECKING:
    from outrider.lab.bench.drafter_arms import BenchPlan

PLAIN_WIDTH = 180  # columns of text where the output is no terminal
EMBEDDED_INFLATE_TO = 100e6


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
@click.option("--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def drafters(json_file: Path | None, markdown_file: Path | None, **given: Any) -> None:
    """Measure every drafter: acceptance by position, speed-up over plain decoding, bytes on the wire.

    Each runs in the verifier's process and, unless it reads the target's KV, in a process of its own.
    """
    from outrider.lab.bench.arms import BenchError
    from outrider.lab.bench.drafter_arms import measure
    from outrider.lab.bench.drafters_report import result_of, to_json, to_markdown, to_table
    from outrider.lab.bench.pairs import describe_machine
    from outrider.lab.same_tokens import plain_decoding, require_same

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
        model = plan.groups[0][0].config.verifier_spec.model
        result = result_of(plan, machine, measurements, plain_decoding(model))
    console_of(PLAIN_WIDTH).print(to_table(result))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(result), indent=2) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(to_markdown(result))
    if result.tally is not None:
        require_same(result.tally)


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
