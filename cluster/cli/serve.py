"""`outrider serve`: the service, until it is interrupted."""

from __future__ import annotations

import logging
import os
from typing import Any

import click

from outrider.cluster.cli.options import config_options, configure, model_options
from outrider.cluster.cli.usage import usage_errors
from outrider.cluster.common.hints import ExplainingCommand
from outrider.cluster.common.server_options import CONTEXT_SETTINGS, admin_key_option
from outrider.cluster.config.config_file import read_pools
from outrider.cluster.config.service_config import MODEL_OPTIONS, ServiceConfig

FIRST_OPTIONS = (  # of a newcomer
    *("speculative_config", "draft_model", "max_model_len", "tensor_parallel_size", "speculation", "num_verifiers"),
    *("host", "port", "served_model_name", "api_key"),
)


class GroupedCommand(ExplainingCommand):
    """A command whose help is FIRST_OPTIONS; with `--help=all` all others follow, in two groups."""

    def get_help_option(self, context: click.Context) -> click.Option:
        def show(context: click.Context, _: click.Parameter, value: str | None) -> None:
            if value is not None and not context.resilient_parsing:
                context.meta[__name__] = value
                click.echo(context.get_help(), color=context.color)
                context.exit()

        about = "Show this message; all: with every option."
        settings: dict[str, Any] = {"is_flag": False, "flag_value": "first", "is_eager": True, "expose_value": False}
        return click.Option(["-h", "--help"], metavar="[all]", help=about, callback=show, **settings)

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Options": [], "Model, drafts and steps": [], "Service": []}
        first, of_model, of_service = groups.values()
        for param in self.get_params(context):
            if (record := param.get_help_record(context)) is not None:
                of_rest = of_model if param.name in MODEL_OPTIONS else of_service
                (first if param.name in (*FIRST_OPTIONS, "help") else of_rest).append(record)
        for title, records in groups.items() if context.meta.get(__name__) == "all" else [("Options", first)]:
            with formatter.section(title):
                formatter.write_dl(records)


@click.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
@model_options
@click.option(
    "--drafter-pool",
    "drafter_pools",
    metavar="JSON",
    multiple=True,
    callback=read_pools,
    help="A further drafter pool, as -sc with a name, and num_drafters, drafter_resources, drafter_labels of its own: "
    '{"name": "lookup", "method": "ngram", "num_drafters": 2}; may be repeated.',
)
@config_options(name for name in ServiceConfig.option_fields() if name not in MODEL_OPTIONS)
@click.option(
    "--api-key",
    multiple=True,
    help="A key that clients may show; may be repeated, and sha256:HEX hides it from ps. Those of the environment "
    "variable OUTRIDER_API_KEY (comma-separated) count too.",
)
@admin_key_option
@click.option(
    "--api-key-file",
    help="Keys, one a line, plain or sha256:HEX; # begins a comment line. Behind a key, store=never: drafters keep "
    "nothing of its requests; store=salted: they may learn from its salted ones, too; role=admin: it is an admin's.",
)
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
