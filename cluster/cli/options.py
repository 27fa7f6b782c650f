"""What verbs share: the options that say what to load and how, and how these become a configuration.

Nothing heavy is imported before a verb runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.config.config_file import read_config_file, read_speculative_config
from outrider.cluster.config.known_models import DEFAULT_MODEL

if TYPE_CHECKING:
    from outrider.cluster.config.service_config import ServiceConfig

Command = Callable[..., None]

PLAIN_WIDTH = 140  # columns of text where the output is no terminal

_MODEL_OPTIONS = (
    click.argument("model", default=DEFAULT_MODEL),
    click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=read_config_file,
        help="YAML: these options by their names; those on the command line win.",
    ),
    click.option(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        is_eager=True,
        callback=read_speculative_config,
        help='How to draft, as vLLM says it: {"method": "ngram", "prompt_lookup_max": 4}; all: docs/drafters.md.',
    ),
    click.option(
        "--draft-model",
        help="Folder or hub id of the draft model or head. Default: the one that is shipped for smollm2 or embedded.",
    ),
    click.option("--revision", help="Hub revision of MODEL."),
    click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with the checkpoint."),
    click.option(
        "--dtype", type=click.Choice(["auto", "float32", "float16", "bfloat16"]), default="auto", show_default=True
    ),
    click.option("--quantization", type=click.Choice(["int8"]), help="Hold the target's linear layers in int8 (CPU)."),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
    click.option(
        "--check-anew", is_flag=True, help="Check logits and measure steps again, though a start here has done so."
    ),
    click.option("--enforce-eager", is_flag=True, help="Capture no steps as CUDA graphs; without CUDA, none is."),
    click.option(
        "--async-scheduling/--no-async-scheduling",
        default=True,
        show_default=True,
        help="Launch the next step before one is read; without CUDA, none is.",
    ),
    click.option("--max-model-len", type=int, help="Longest sequence in tokens. Default: the model's own limit."),
    click.option("--tensor-parallel-size", "-tp", type=int, default=1, show_default=True, help="Ranks per verifier."),
    click.option("--draft-tensor-parallel-size", type=int, default=1, show_default=True, help="Ranks per drafter."),
    click.option(
        "--num-speculative-tokens", type=int, default=4, show_default=True, help="Longest draft; 0: never speculate."
    ),
    click.option("--max-num-seqs", type=int, default=256, show_default=True, help="Most requests in one step."),
    click.option(
        "--max-num-batched-tokens", type=int, default=2048, show_default=True, help="Most tokens in one step."
    ),
    click.option("--kv-cache-memory-bytes", type=int, help="KV pool of one rank. Default: from the free memory."),
    click.option("--block-size", type=int, default=16, show_default=True, help="Tokens per KV block."),
    click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True, show_default=True),
    click.option("--threads-per-rank", type=int, help="CPU threads of each rank. Default: a fair share of the cores."),
    click.option("--seed", type=int, help="Seed of unseeded requests' sampling. Default: from the system."),
)

speculation_option = click.option(
    "--speculation",
    type=click.Choice(["auto", "always", "off"]),
    default="auto",
    show_default=True,
    help="Who decides: load and prices (auto), or a pin: off, or always --num-speculative-tokens.",
)


def model_options(command: Command) -> Command:
    """Add the options that say what to load and how."""
    for option in reversed(_MODEL_OPTIONS):
        command = option(command)
    return command


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Show a bad value as a usage error, not as a traceback."""
    try:
        yield
    except BrokenPipeError:  # who reads has read enough: click ends quietly
        raise
    except (ValueError, OSError) as error:  # OSError: no such model, here or at the hub
        raise click.UsageError(str(error)) from error


def configure(**options: Any) -> ServiceConfig:
    """Build the configuration; imported here, so that `outrider --help` does not load torch."""
    from outrider.cluster.config.service_config import ServiceConfig

    with usage_errors():
        return ServiceConfig(**options)
