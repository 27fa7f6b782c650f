"""`outrider drafters`: a pool of drafters alone, for verifiers of other engines, until it is interrupted."""

from __future__ import annotations

import logging
import os
from typing import Any

import click

from outrider.cluster.cli.options import config_option, config_options
from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.security import LinkTls
from outrider.cluster.common.server_options import CONTEXT_SETTINGS, admin_key_option
from outrider.cluster.config.config_file import read_speculative_config

LOOKUPS = ("ngram", "suffix")  # that a pool does without a checkpoint; lookahead, too, but is slower than suffix


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
@config_options(["num_drafters"])
@config_option("draft_tensor_parallel_size", "--tensor-parallel-size", "-tp")
@config_option("num_speculative_tokens", default=8, help="Longest draft.")
@config_option("num_verifiers", "--num-engines", type=int, default=1, help="Engines that draft from the pool.")
@config_option("max_num_seqs", help="Most requests of one engine.")
@config_option("max_model_len", help="Longest sequence in tokens. Default: the draft model's own limit.")
@config_option("max_num_batched_tokens", help="Most tokens in one round.")
@config_options(["kv_cache_memory_bytes", "dtype", "device", "trust_remote_code", "threads_per_rank", "gpu_share"])
@config_options(["drafter_resources", "drafter_labels", "learner", "weights_root"])
@config_option("host", help="Where the directory listens.")
@config_option("grpc_port", "--port", default=50061, help="Of the directory, gRPC.")
@config_option("port", "--http-port", default=8061, help="Of /metrics and /health.")
@config_option("internal_host", help="Where drafters listen for engines; auto: each node's own address.")
@config_options(["log_format", *LinkTls.model_fields])
@admin_key_option
def drafters(draft: str, **options: Any) -> None:
    """Serve a pool of drafters alone, which vLLM drafts from with our plug-in (docs/vllm.md).

    DRAFT is the folder or hub id of a draft model or head, or ngram or suffix, which look drafts up in what was written
    before, or a method whose drafter is shipped for the target: eagle3 for smollm2.
    """
    from outrider.cluster.common.api_keys import with_api_key_hashes
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
        config = DraftersConfig(**with_api_key_hashes(options, os.environ))
    configure_logging(config.log_format, level=logging.getLogger().level)
    try:
        with usage_errors():
            serve_drafters_until_interrupted(config)
    except DeployError as error:
        raise click.ClickException(str(error)) from error
