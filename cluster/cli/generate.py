"""`outrider generate`: prompts in, text or JSON lines out, no server."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from outrider.cluster.cli.options import config_option, model_options
from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS


@click.command(context_settings=CONTEXT_SETTINGS)
@model_options
@config_option("speculation")
@click.option("--prompt", "prompt_texts", multiple=True, help="A prompt; may be repeated.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSONL: prompt, prompt_token_ids or messages per line, and sampling fields of its own.",
)
@click.option("--chat", "is_chat", is_flag=True, help="A prompt is what a user says: use the model's chat template.")
@click.option("--system", help="A first message that tells the model how to behave; needs --chat.")
@click.option("--max-tokens", default=64, show_default=True)
@click.option("--temperature", default=0.0, show_default=True)
@click.option("--top-p", default=1.0, show_default=True)
@click.option("--top-k", default=0, show_default=True, help="0 and -1: off.")
@click.option("--min-p", default=0.0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option("--drafter-process", is_flag=True, help="Draft in a process on a core of its own.")
@click.option("--json", "as_json", is_flag=True, help="A JSON line per prompt, as it ends.")
def generate(
    prompt_texts: tuple[str, ...],
    prompts_file: Path | None,
    is_chat: bool,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    ignore_eos: bool,
    drafter_process: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Generate without a server, with the same engine and drafter code. With --seed, text is the same every time."""
    from outrider.cluster.offline import generation
    from outrider.cluster.offline.llm import offline_config
    from outrider.cluster.offline.sampling_params import SamplingParams

    with usage_errors():
        offline_config(options)  # a wrong option is reported before a wrong prompt
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            ignore_eos=ignore_eos,
            seed=options["seed"],
        )
        lines = generation.read_lines(prompt_texts, prompts_file, is_chat=is_chat, system=system)
        is_silent = bool(lines)
        run = generation.run(options, lines, sampling, drafter_process=drafter_process, as_json=as_json)
        with contextlib.closing(run) as printed:  # also where nobody reads on
            for part in printed:
                click.echo(part.text, nl=False)
                is_silent = is_silent and part.is_silence
        if is_silent and (hint := generation.hint(options["model"], is_chat=is_chat)) is not None:
            click.echo(hint, err=True)
