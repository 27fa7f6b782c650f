"""The `outrider` command: a group of verbs, each in a module of its own that is imported when it is asked for.

So nothing of the laboratory is loaded where something is served: its verbs are names here.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS

VERBS = {
    "serve": "outrider.cluster.cli.serve:serve",
    "drafters": "outrider.cluster.cli.drafters:drafters",
    "check": "outrider.cluster.cli.check:check",
    "generate": "outrider.cluster.cli.generate:generate",
    "chat": "outrider.cluster.cli.chat:chat",
    "top": "outrider.cluster.cli.top:top",
    "learner": "outrider.cluster.cli.learner:learner",
    "train-drafter": "outrider.cluster.cli.train:train_drafter",
    "demo": "outrider.lab.cli.demo:demo",
    "bench": "outrider.lab.cli.bench:bench",
    "simulate": "outrider.lab.cli.simulate:simulate",
    "generate-corpus": "outrider.lab.cli.generate_corpus:generate_corpus",
    "make-head": "outrider.lab.cli.make_head:make_head",
}


class Verbs(Mapping[str, click.Command]):
    """The verbs by their names, each imported when it is asked for."""

    def __getitem__(self, name: str) -> click.Command:
        module, _, verb = VERBS[name].partition(":")
        command: click.Command = getattr(import_module(module), verb)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


@click.group(commands=Verbs(), context_settings=CONTEXT_SETTINGS)
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="warning", show_default=True
)
@click.version_option(package_name="outrider")
def main(log_level: str) -> None:
    """Serve large language models with speculative decoding whose drafting is a service of its own."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
