"""The `outrider` command: a group of verbs, each in a module of its own."""

from __future__ import annotations

import logging
import sys

import click

from outrider.cluster.cli.bench import bench
from outrider.cluster.cli.chat import chat
from outrider.cluster.cli.check import check
from outrider.cluster.cli.demo import demo
from outrider.cluster.cli.drafters import drafters
from outrider.cluster.cli.generate import generate
from outrider.cluster.cli.generate_corpus import generate_corpus
from outrider.cluster.cli.serve import serve
from outrider.cluster.cli.simulate import simulate
from outrider.cluster.cli.top import top
from outrider.cluster.cli.train import train_drafter
from outrider.cluster.common.server_options import CONTEXT_SETTINGS


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


for verb in (serve, drafters, check, demo, generate, chat, top, bench, simulate, generate_corpus, train_drafter):
    main.add_command(verb)
