"""`outrider make-head`: a target in, an EAGLE-3 head and its served figures out, within so many minutes.

Nothing heavy is imported before the command runs.
"""

from __future__ import annotations

from pathlib import Path

import click

from outrider.cluster.cli.train import layer_ids
from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.config.known_models import DEFAULT_MODEL

DEFAULT_MINUTES = 9.0


@click.command("make-head", context_settings=CONTEXT_SETTINGS)
@click.argument("model", default=DEFAULT_MODEL)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("build/head"),
    show_default=True,
    help="Folder of the corpus, the head and the figures.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_MINUTES,
    show_default=True,
    help="Of this start; shared out among what is left to do.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, path_type=Path),
    multiple=True,
    help="Learn from it, too: as of train-drafter; repeatable.",
)
@click.option("--streams", type=click.IntRange(min=1), help="Answers that are made at once. Default: 256.")
@click.option("--rows", type=click.IntRange(min=1), help="Windows of 256 tokens in a training step. Default: 64.")
@click.option(
    "--draft-vocab-size", type=click.IntRange(min=1), help="Draft the most frequent tokens alone. Default: 32,000."
)
@click.option(
    "--taps", metavar="I,J,K", callback=layer_ids, help="Layers of MODEL whose input is read, as of train-drafter."
)
@click.option("--max-model-len", type=click.IntRange(min=1), help="Longest sequence. Default: the model's own limit.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--tiny", is_flag=True, help="A few streams, steps and prompts: whether all works, in seconds.")
def make_head(
    model: str,
    output: Path,
    minutes: float,
    text: tuple[Path, ...],
    streams: int | None,
    rows: int | None,
    draft_vocab_size: int | None,
    taps: tuple[int, ...] | None,
    max_model_len: int | None,
    device: str,
    tiny: bool,
) -> None:
    """Have MODEL answer prompts, train an EAGLE-3 head on that, and measure what the head is served at.

    The same command goes on where it stopped. figures.md and figures.json say what came of each phase.
    """
    from dataclasses import replace

    from outrider.lab.head.make import TINY, HeadOptions, HeadSizes
    from outrider.lab.head.make import make_head as make

    sizes = TINY if tiny else HeadSizes()
    sizes = replace(sizes, streams=streams or sizes.streams, rows=rows or sizes.rows)
    shape = {} if draft_vocab_size is None else {"draft_vocab_size": draft_vocab_size}
    with usage_errors():
        options = HeadOptions(
            model=model,
            output=output,
            minutes=minutes,
            sizes=sizes,
            text=text,
            device=device,
            taps=taps or (),
            max_model_len=max_model_len,
            **shape,
        )
        is_done = make(options, click.echo)
    page = output / "figures.md"
    click.echo(page.read_text() if page.exists() else "nothing was done")
    if not is_done:
        raise click.ClickException("there was no time for all phases; the same command goes on with the rest")
