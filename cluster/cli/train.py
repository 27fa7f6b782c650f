"""`outrider train-drafter`: options in, a drafter's folder and its acceptance by position out.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.cli.usage import PLAIN_WIDTH, usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, show_work
from outrider.drafter_service.service.methods import TRAINED

if TYPE_CHECKING:
    from rich.table import Table

    from outrider.drafter_service.training.acceptance import AcceptanceFigures
    from outrider.drafter_service.training.distil import Distilled, DistilOptions
    from outrider.drafter_service.training.trainer import StepReport

OBJECTIVES = ("ce", "tv", "streak")
DEFAULT_MINUTES = 30.0


def methods_with(option: str) -> list[str]:
    """Return the methods that an option is of, where not all have it."""
    return [name for name, record in TRAINED.items() if option in (record.trained_with or ())]


def layer_ids(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Read an option's layer numbers."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError as error:
        raise click.BadParameter("expected layer numbers with commas between them") from error


_OPTIONS = (
    click.argument("method", type=click.Choice(list(TRAINED))),
    click.option(
        "--target",
        required=True,
        help="The target model, with its tokenizer: a folder, a GGUF file, a hub id or a short name.",
    ),
    click.option(
        "--text",
        type=click.Path(exists=True, path_type=Path),
        multiple=True,
        required=True,
        help="Learn from it: text, .jsonl (`text` or `messages`), shards of generate-corpus, or a folder; repeatable.",
    ),
    click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="The new drafter."),
    click.option(
        "--held-out",
        type=click.Path(exists=True, path_type=Path),
        multiple=True,
        help="What to measure on. Default: 2 % of the text, which is then not learnt from.",
    ),
    click.option(
        "--objective",
        type=click.Choice(OBJECTIVES),
        default="ce",
        show_default=True,
        help="Lower the cross-entropy to the target's law, the total variation from it, or the cross-entropy where a "
        "position counts as far as those before it are accepted.",
    ),
    click.option("--steps", "num_steps", type=click.IntRange(min=1), help="Train for so many steps."),
    click.option(
        "--minutes",
        type=click.FloatRange(min=0, min_open=True),
        help=f"Train for so long. Default: {DEFAULT_MINUTES:g}, unless --steps is given.",
    ),
    click.option(
        "--judge-every",
        "judge_minutes",
        type=click.FloatRange(min=0, min_open=True),
        default=10.0,
        show_default=True,
        help="Minutes of training after which held-out prompts are served to see whether it still gets better.",
    ),
    click.option("--resume", is_flag=True, help="Go on with the run that stopped in OUTPUT.training."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option("--rows", type=click.IntRange(min=1), default=16, show_default=True, help="Windows per step."),
    click.option("--window", type=click.IntRange(min=2), default=256, show_default=True, help="Tokens per window."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option(
        "--num-speculative-tokens",
        "num_positions",
        type=click.IntRange(min=1),
        default=4,
        show_default=True,
        help="Draft positions that are trained; draft-model: that are measured alone.",
    ),
    click.option(
        "--num-layers",
        type=click.IntRange(min=1),
        help="draft-model, parallel-draft, dflash: layers; medusa: blocks per head.",
    ),
    click.option(
        "--hidden-size",
        type=click.IntRange(min=8),
        help="draft-model, parallel-draft: width. Default: half the target's. mlp-speculator: of its recurrence.",
    ),
    click.option(
        "--init-from",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="draft-model, parallel-draft, eagle3, tidar: go on with this one. Default: a new one; tidar: the target.",
    ),
    click.option(
        "--rate-scale",
        type=click.FloatRange(min=0, min_open=True),
        help="Learning rates beside the usual ones. Default: 1; with --init-from, and of tidar, 0.1.",
    ),
    click.option(
        "--draft-vocab-size",
        type=click.IntRange(min=1),
        help="medusa, eagle3: draft the most frequent tokens alone. Default: all for medusa, 32,000 for eagle3.",
    ),
    click.option(
        "--taps",
        metavar="I,J,K",
        callback=layer_ids,
        help="eagle3, dflash: layers of the target whose input is read. Default: 2, the middle one, the last but two.",
    ),
    click.option(
        "--json", "json_file", type=click.Path(dir_okay=False, writable=True, path_type=Path), help="Figures, too."
    ),
)


def _train_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("train-drafter", context_settings=CONTEXT_SETTINGS)
@_train_options
def train_drafter(json_file: Path | None, **options: Any) -> None:
    """Distil a drafter for any target from text: a draft model, a head over its states, or a block drafter.

    tidar: the target itself is taught to draft.

    OUTPUT holds the public format of the METHOD and acceptance.json; OUTPUT.training holds the checkpoint.
    """
    from outrider.drafter_service.training.distil import distil, to_json

    with usage_errors():
        distil_options = _parse(**options)
        with _progress(distil_options) as on_step:
            distilled = distil(distil_options, on_step)
    console = console_of(PLAIN_WIDTH)
    console.print(to_table(distilled.acceptance))
    console.print(_summary(distil_options, distilled))
    if json_file is not None:
        json_file.write_text(json.dumps(to_json(distil_options, distilled), indent=2) + "\n")


def _parse(
    *,
    method: Any,
    target: str,
    objective: str,
    num_steps: int | None,
    minutes: float | None,
    judge_minutes: float,
    num_layers: int | None,
    hidden_size: int | None,
    rate_scale: float | None,
    draft_vocab_size: int | None,
    taps: tuple[int, ...] | None,
    init_from: Path | None,
    **options: Any,
) -> DistilOptions:
    from outrider.cluster.config.known_models import path_of
    from outrider.drafter_service.training.dflash import DFlashShape
    from outrider.drafter_service.training.distil import DistilOptions
    from outrider.drafter_service.training.draft_model import DraftShape
    from outrider.drafter_service.training.eagle3 import Eagle3Shape
    from outrider.drafter_service.training.medusa import MedusaShape
    from outrider.drafter_service.training.mlp_speculator import MlpShape
    from outrider.drafter_service.training.objectives import Objective
    from outrider.drafter_service.training.trainer import Budget
    from outrider.verifier_service.model.architectures import resolve_folder
    from outrider.verifier_service.model.config import ModelConfig

    own: dict[str, object] = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "draft_vocab_size": draft_vocab_size,
        "taps": taps,
        "init_from": init_from,
    }
    for name, value in own.items():
        if value is not None and method not in (known := methods_with(name)):
            raise ValueError(f"--{name.replace('_', '-')} is an option of {_listed(known)} alone")
    if minutes is None:
        minutes = DEFAULT_MINUTES if num_steps is None else math.inf
    return DistilOptions(
        method=method,
        target=resolve_folder(ModelConfig(path=path_of(target))),
        budget=Budget(num_steps=num_steps, minutes=minutes),
        objective=Objective(objective),
        judge_every_s=judge_minutes * 60,
        init_from=init_from,
        rate_scale=rate_scale,
        draft=DraftShape(hidden_size=hidden_size or 0, num_layers=num_layers or 0),
        medusa=MedusaShape(num_layers=num_layers or 1, draft_vocab_size=draft_vocab_size or 0),
        eagle3=Eagle3Shape(draft_vocab_size=draft_vocab_size or Eagle3Shape().draft_vocab_size, taps=taps or ()),
        mlp=MlpShape(inner_dim=hidden_size or 0),
        dflash=DFlashShape(num_layers=num_layers or DFlashShape().num_layers, taps=taps or ()),
        **options,
    )


def _listed(methods: Sequence[str]) -> str:
    *others, last = methods
    return f"{', '.join(others)} and {last}" if others else last


def to_table(figures: AcceptanceFigures) -> Table:
    """Lay out acceptance by position."""
    from rich.table import Table

    table = Table(title=f"acceptance on held-out text, {figures.num_roots:,} drafts")
    for heading in ("position", "greedy", "greedy, and all before", "by rejection"):
        table.add_column(heading, justify="right")
    for row in figures.positions:
        table.add_row(str(row.position + 1), f"{row.greedy:.3f}", f"{row.chain:.3f}", f"{row.rejection:.3f}")
    return table


def _summary(options: DistilOptions, distilled: Distilled) -> str:
    figures, served = distilled.acceptance, distilled.served
    headline = "no prompts are held out, so that nothing was served"
    if served is not None:
        headline = (
            f"served: {served.mean_acceptance_length:.2f} tokens per verification of {served.num_committed:,} held-out "
            f"tokens, greedy, drafts of {options.num_positions}"
        )
    return (
        f"{headline}\n"
        f"in windows of text: {figures.greedy_length:.2f} greedy, {figures.rejection_length:.2f} by rejection; "
        f"{distilled.num_steps:,} steps, {distilled.num_tokens:,} tokens, {distilled.elapsed_s / 60:.1f} min; "
        f"wrote {options.output}"
    )


@contextlib.contextmanager
def _progress(options: DistilOptions) -> Iterator[Callable[[StepReport], None]]:
    """Show on stderr how much of the budget is used, and the loss; yields a listener for steps."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # of loading weights: it would draw over ours
    with show_work(options.method, 1.0) as on_work:

        def on_step(report: StepReport) -> None:
            served = "" if report.served is None else f", served {report.served:.2f}"
            on_work(report.share_used, f"step {report.step:,}, loss {report.loss:.3f}{served}")

        yield on_step
