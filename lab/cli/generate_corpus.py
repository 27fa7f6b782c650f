"""`outrider generate-corpus`: a target in, shards of its own answers out, for `outrider train-drafter --text`.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.cli.options import config_option, model_options
from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import parse_numbers, show_work

if TYPE_CHECKING:
    from collections.abc import Sequence

DEFAULT_NUM_TOKENS = 1_500_000


def _temperatures(_: click.Context, __: click.Parameter, value: str) -> tuple[float, ...]:
    return tuple(parse_numbers(value, float))


@click.command("generate-corpus", context_settings=CONTEXT_SETTINGS)
@model_options
@config_option("speculation")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the shards.")
@click.option("--num-tokens", type=click.IntRange(1), default=DEFAULT_NUM_TOKENS, show_default=True, help="In all.")
@click.option("--prompts-per-shard", type=click.IntRange(1), default=512, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=256, show_default=True, help="Of an answer.")
@click.option(
    "--temperatures",
    default="0,0.8",
    show_default=True,
    callback=_temperatures,
    help="One of them for each prompt; 0: greedy.",
)
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSONL, {"prompt": "what a user says"} per line. Default: templated ones, as many as are needed.',
)
@click.option("--corpus-seed", type=int, default=0, show_default=True, help="Other prompts, other samples.")
def generate_corpus(
    output: Path,
    num_tokens: int,
    prompts_per_shard: int,
    max_tokens: int,
    temperatures: tuple[float, ...],
    prompts_file: Path | None,
    corpus_seed: int,
    **options: Any,
) -> None:
    """Have MODEL answer prompts of many kinds and keep what it says; the same command goes on where it stopped."""
    from outrider.cluster.offline.llm import LLM
    from outrider.lab.corpus.generate import CorpusOptions
    from outrider.lab.corpus.generate import generate_corpus as generate

    with usage_errors():
        corpus = CorpusOptions(
            output=output,
            num_tokens=num_tokens,
            prompts_per_shard=prompts_per_shard,
            max_tokens=max_tokens,
            temperatures=temperatures,
            seed=corpus_seed,
            prompts=() if prompts_file is None else _read_prompts(prompts_file),
        )
        with LLM(**options) as llm, show_work("generate-corpus", num_tokens) as on_work:
            total = generate(llm, corpus, lambda done: on_work(done, f"{done:,} tokens"))
    click.echo(f"{total:,} tokens in {output}")


def _read_prompts(file: Path) -> Sequence[str]:
    from outrider.cluster.offline.prompts import PromptError, read_prompt_lines

    texts: list[str] = []
    for number, line in enumerate(read_prompt_lines(file), start=1):
        text = line.get("prompt")
        if not isinstance(text, str):
            raise PromptError(f"{file}:{number}: prompt must be a string")
        texts.append(text)
    return texts
