"""`outrider serve`: the service, until it is interrupted."""

from __future__ import annotations

import logging
import os
from typing import Any

import click

from outrider.cluster.cli.options import configure, model_options, speculation_option, usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.config.config_file import read_pools
from outrider.cluster.config.security_options import security_options
from outrider.cluster.replies.families import REASONING_FAMILIES, TOOL_FAMILIES


@click.command(context_settings=CONTEXT_SETTINGS)
@model_options
@click.option(
    "--engine",
    type=click.Choice(["outrider", "vllm"]),
    default="outrider",
    show_default=True,
    help="Of the verifiers. vllm: vLLM, with drafts from our pools; docs/vllm.md says how it is installed.",
)
@click.option(
    "--engine-kwargs",
    metavar="JSON",
    default="{}",
    help='Further arguments of vLLM\'s engine, by its names: {"quantization": "fp8"}.',
)
@click.option(
    "--lora-modules",
    metavar="JSON",
    default="{}",
    help='LoRA adapters that vLLM serves, which clients name as model: {"name": "folder"}.',
)
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
    "--tool-call-parser",
    type=click.Choice(sorted(TOOL_FAMILIES)),
    help="How MODEL writes tool calls. Default: as its tokenizer's response template says, if it has one.",
)
@click.option(
    "--reasoning-parser",
    type=click.Choice(sorted(REASONING_FAMILIES)),
    help="How MODEL marks what it thinks; split off as reasoning_content. Default: as for tool calls.",
)
@click.option(
    "--internal-host",
    default="127.0.0.1",
    show_default=True,
    help="Where replicas listen for each other; auto: each node's own address.",
)
@click.option("--gpu-share", type=float, default=1.0, show_default=True, help="GPU per rank; 0.5: two ranks share one.")
@click.option(
    "--allowed-origins",
    metavar="JSON",
    default='["*"]',
    show_default=True,
    help="Origins whose pages a browser lets call the API; []: none but its own.",
)
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
    """Serve MODEL over HTTP and gRPC until interrupted.

    MODEL is a folder, a GGUF file, a hub id, smollm2 (SmolLM2-135M-Instruct with its drafter, the default) or embedded
    (a tiny pair, for tests).
    """
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
