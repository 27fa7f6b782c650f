"""The `outrider` command."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.cli.bench import PLAIN_WIDTH, bench
from outrider.cluster.cli.simulate import simulate
from outrider.cluster.cli.train import train_drafter
from outrider.cluster.common.server_options import CONTEXT_SETTINGS, server_options
from outrider.cluster.common.terminal import console_of
from outrider.cluster.config.config_file import read_config_file, read_pools, read_speculative_config
from outrider.cluster.config.security_options import security_options

if TYPE_CHECKING:
    from outrider.cluster.config.service_config import ServiceConfig

Command = Callable[..., None]

_MODEL_OPTIONS = (
    click.argument("model", required=False),
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
        help='How to draft, as vLLM says it: {"method": "ngram", "prompt_lookup_max": 4}; README.md lists the methods.',
    ),
    click.option(
        "--draft-model",
        help="Folder or hub id of the draft model or head. Default: the embedded one, with the embedded target.",
    ),
    click.option("--revision", help="Hub revision of MODEL."),
    click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with the checkpoint."),
    click.option(
        "--dtype", type=click.Choice(["auto", "float32", "float16", "bfloat16"]), default="auto", show_default=True
    ),
    click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True),
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
    click.option("--threads-per-rank", type=int, default=1, show_default=True, help="CPU threads of each rank."),
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
    except (ValueError, OSError) as error:  # OSError: no such model, here or at the hub
        raise click.UsageError(str(error)) from error


def configure(**options: Any) -> ServiceConfig:
    """Build the configuration; imported here, so that `outrider --help` does not load torch."""
    from outrider.cluster.config.service_config import ServiceConfig

    with usage_errors():
        return ServiceConfig.from_mapping(options)


@click.group(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="warning", show_default=True
)
@click.version_option(package_name="outrider")
def main(log_level: str) -> None:
    """Serve large language models with speculative decoding whose drafting is a service of its own."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )


@main.command()
@model_options
@click.option(
    "--num-verifiers", default="1", show_default=True, help="Replicas of the target model; min:max: scaled by load."
)
@click.option(
    "--num-drafters", default="1", show_default=True, help="Replicas of the draft model; min:max: scaled by load."
)
@click.option(
    "--drafter-pool",
    "drafter_pools",
    metavar="JSON",
    multiple=True,
    callback=read_pools,
    help="A further drafter pool, as -sc with a name, and num_drafters, drafter_resources, drafter_labels of its own: "
    '{"name": "lookup", "method": "ngram", "num_drafters": 2}; may be repeated.',
)
@click.option("--num-gateways", default="1", show_default=True, help="Replicas of the API; min:max: scaled by load.")
@click.option("--verifier-resources", metavar="JSON", default="{}", help="Custom Ray resources of each verifier.")
@click.option("--drafter-resources", metavar="JSON", default="{}", help="Custom Ray resources of each drafter.")
@click.option("--verifier-labels", metavar="JSON", default="{}", help="Ray label selector of verifiers' nodes.")
@click.option("--drafter-labels", metavar="JSON", default="{}", help="Ray label selector of drafters' nodes.")
@click.option(
    "--max-queued-requests",
    type=int,
    default=1024,
    show_default=True,
    help="Most requests that wait per verifier; more are told to come back.",
)
@click.option(
    "--failover-timeout-s",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds that a request which lost its verifier waits for another.",
)
@click.option(
    "--engine-timeout-s",
    type=float,
    default=10.0,
    show_default=True,
    help="Seconds of silence after which an engine is given up.",
)
@click.option(
    "--drain-timeout-s",
    type=float,
    default=30.0,
    show_default=True,
    help="How long a replica that shall stop waits for its streams.",
)
@speculation_option
@click.option(
    "--draft-length-by-batch-size",
    metavar="JSON",
    default="[]",
    help="Pin draft lengths by running requests, as vLLM's num_speculative_tokens_per_batch_size: "
    "[[first, last, length], ...].",
)
@click.option("--served-model-name", help="Name in the API. Default: MODEL.")
@click.option(
    "--internal-host",
    default="127.0.0.1",
    show_default=True,
    help="Where replicas listen for each other; auto: each node's own address.",
)
@click.option("--gpu-share", type=float, default=1.0, show_default=True, help="GPU per rank; 0.5: two ranks share one.")
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=int, default=8000, show_default=True, help="HTTP port.")
@click.option("--grpc-port", type=int, default=50051, show_default=True)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of every replica."
)
@click.option("--otlp-traces-endpoint", metavar="URL", help="Send traces there by OTLP over gRPC. Default: no traces.")
@click.option(
    "--trace-sample-ratio",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Share of requests to trace, where the caller's traceparent does not decide.",
)
@security_options
def serve(**options: Any) -> None:
    """Serve MODEL (the embedded pair if none is given) over HTTP and gRPC until interrupted."""
    from outrider.cluster.common.api_keys import with_api_key_hashes
    from outrider.cluster.common.logs import configure_logging
    from outrider.cluster.replicas.serving import DeployError, serve_until_interrupted

    with usage_errors():
        options = with_api_key_hashes(options, os.environ)
    config = configure(**options)
    configure_logging(config.log_format, level=logging.getLogger().level)
    try:
        with usage_errors():
            serve_until_interrupted(config)
    except DeployError as error:
        raise click.ClickException(str(error)) from error


@main.command()
def demo() -> None:
    """Serve the embedded pair, stream over HTTP and gRPC with speculation off and on, stop."""
    from outrider.cluster.cli import demo as demonstration

    # pinned, so that both sides are shown whatever pays on this machine
    demonstration.run(configure(speculation="always"))


@main.command()
@model_options
@speculation_option
@click.option("--prompt", "prompt_texts", multiple=True, help="A prompt; may be repeated.")
@click.option(
    "--prompts",
    "prompts_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSONL: prompt or prompt_token_ids per line, and sampling fields of its own.",
)
@click.option("--max-tokens", type=int, default=64, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--top-p", type=float, default=1.0, show_default=True)
@click.option("--top-k", type=int, default=0, show_default=True, help="0: off.")
@click.option("--min-p", type=float, default=0.0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@click.option("--drafter-process", is_flag=True, help="Draft in a process on a core of its own.")
@click.option("--json", "as_json", is_flag=True, help="A JSON line per prompt.")
def generate(
    prompt_texts: tuple[str, ...],
    prompts_file: Path | None,
    drafter_process: bool,
    as_json: bool,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    ignore_eos: bool,
    **options: Any,
) -> None:
    """Generate without a server, with the same engine and drafter code. With --seed, text is the same every time."""
    from outrider.cluster.offline import generation
    from outrider.verifier_service.messages.request import SamplingParams

    config = configure(**options)
    with usage_errors():
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            ignore_eos=ignore_eos,
            seed=config.seed,
        )
        for record in generation.run(config, sampling, prompt_texts, prompts_file, drafter_process=drafter_process):
            click.echo(json.dumps(record) if as_json else record.get("error") or record["text"])


@main.command()
@server_options
@click.option("--model", help="Default: the first that the server lists.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="Of one answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--system", help="A first message that tells the model how to behave.")
def chat(model: str | None, max_tokens: int, temperature: float, system: str | None, **server: Any) -> None:
    """Talk to a running server; shows each answer's tokens/s, time to first token and acceptance."""
    import time

    from outrider.cluster.client import chat as conversation
    from outrider.cluster.client.openai_client import Server, ServerError

    options = conversation.ChatOptions(model=model, max_tokens=max_tokens, temperature=temperature, system=system)
    with usage_errors():
        try:
            conversation.run(Server(**server), options, time.perf_counter)
        except ServerError as error:
            raise click.ClickException(str(error)) from error


@main.command()
@server_options
@click.option("--interval", type=click.FloatRange(min=0.1), default=1.0, show_default=True, help="Seconds per frame.")
@click.option("--once", is_flag=True, help="Print one frame and stop; exit status 1 without an answer.")
def top(interval: float, once: bool, **server: Any) -> None:
    """Watch a running service: pools, load, prices, acceptance, the router's decisions."""
    import time

    from outrider.cluster.client import top as watching
    from outrider.cluster.client.openai_client import Server

    with usage_errors(), contextlib.suppress(KeyboardInterrupt):
        console = console_of(PLAIN_WIDTH)
        state = watching.run(Server(**server), console, interval_s=interval, once=once, clock=time.monotonic)
        if state.error is not None:
            raise click.exceptions.Exit(1)


main.add_command(bench)
main.add_command(simulate)
main.add_command(train_drafter)
