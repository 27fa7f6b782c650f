"""`outrider drafters`: a pool of drafters alone, for verifiers of other engines, until it is interrupted."""

from __future__ import annotations

import logging
from typing import Any

import click

from outrider.cluster.cli.options import usage_errors
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.config.config_file import read_speculative_config
from outrider.cluster.config.security_options import link_security_options

LOOKUPS = ("ngram", "suffix")  # that a pool can do without any checkpoint of its own


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("draft")
@click.option("--target", "model", required=True, help="Folder or hub id of the model that the other engine serves.")
@click.option(
    "--speculative-config",
    "-sc",
    metavar="JSON",
    is_eager=True,
    callback=read_speculative_config,
    help="How to draft, as for `outrider serve`.",
)
@click.option(
    "--num-drafters", default="1", show_default=True, help="Replicas of the draft model; min:max: scaled by load."
)
@click.option(
    "--tensor-parallel-size",
    "-tp",
    "draft_tensor_parallel_size",
    type=int,
    default=1,
    show_default=True,
    help="Ranks per drafter.",
)
@click.option("--num-speculative-tokens", type=int, default=8, show_default=True, help="Longest draft.")
@click.option(
    "--num-engines", "num_verifiers", type=int, default=1, show_default=True, help="Engines that draft from the pool."
)
@click.option("--max-num-seqs", type=int, default=256, show_default=True, help="Most requests of one engine.")
@click.option("--max-model-len", type=int, help="Longest sequence in tokens. Default: the draft model's own limit.")
@click.option("--max-num-batched-tokens", type=int, default=2048, show_default=True, help="Most tokens in one round.")
@click.option("--kv-cache-memory-bytes", type=int, help="KV pool of one rank. Default: from the free memory.")
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "float16", "bfloat16"]), default="auto", show_default=True
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--trust-remote-code", is_flag=True, help="Run model code that comes with a checkpoint.")
@click.option("--threads-per-rank", type=int, help="CPU threads of each rank. Default: a fair share of the cores.")
@click.option("--gpu-share", type=float, default=1.0, show_default=True, help="GPU per rank; 0.5: two ranks share one.")
@click.option("--drafter-resources", metavar="JSON", default="{}", help="Custom Ray resources of each drafter.")
@click.option("--drafter-labels", metavar="JSON", default="{}", help="Ray label selector of drafters' nodes.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the directory listens.")
@click.option("--port", "grpc_port", type=int, default=50061, show_default=True, help="Of the directory, gRPC.")
@click.option("--http-port", "port", type=int, default=8061, show_default=True, help="Of /metrics and /health.")
@click.option(
    "--internal-host",
    default="127.0.0.1",
    show_default=True,
    help="Where drafters listen for engines; auto: each node's own address.",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True, help="Of every replica."
)
@link_security_options
def drafters(draft: str, **options: Any) -> None:
    """Serve a pool of drafters alone, which vLLM drafts from with our plug-in (docs/vllm.md).

    DRAFT is the folder or hub id of a draft model or head, or ngram or suffix, which look drafts up in what was written
    before, or a method whose drafter is shipped for the target: eagle3 for smollm2.
    """
    from outrider.cluster.common.logs import configure_logging
    from outrider.cluster.config.drafters_config import DraftersConfig
    from outrider.cluster.config.known_models import drafter_paths
    from outrider.cluster.replicas.serving import DeployError, serve_drafters_until_interrupted

    shipped = {method.value: str(path) for method, path in drafter_paths(options["model"]).items()}
    if draft in LOOKUPS or draft in shipped:
        method = options["speculative_config"].get("method", draft)
        if method != draft:
            raise click.BadParameter(f"method: {method}, where DRAFT is {draft}", param_hint="--speculative-config")
        options["speculative_config"] = {**options["speculative_config"], "method": draft}
        options["draft_model"] = shipped.get(draft)
    else:
        options["draft_model"] = draft
        options["speculative_config"] = {"method": "draft_model", **options["speculative_config"]}
    with usage_errors():
        config = DraftersConfig(**options)
    configure_logging(config.log_format, level=logging.getLogger().level)
    try:
        with usage_errors():
            serve_drafters_until_interrupted(config)
    except DeployError as error:
        raise click.ClickException(str(error)) from error
