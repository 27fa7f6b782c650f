"""`make study NAME=acceptance ARGS="smollm2 --drafter ..."`: what a verification brings, by kind of prompt.

What is measured and how: outrider.lab.head.acceptance, which judges new heads, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.lab.head.acceptance import measure, to_rows
from outrider.lab.report import describe_machine, files, show_page

PLAIN_WIDTH = 160
DEFAULT_DRAFTERS = (
    'n-gram={"method": "ngram", "prompt_lookup_min": 1}',
    'suffix={"method": "suffix"}',
    'EAGLE-3={"method": "eagle3"}',
    'EAGLE-3, tree={"method": "eagle3", "num_tree_nodes": 16}',
    'suffix or EAGLE-3={"method": "hybrid", "methods": ["suffix", "eagle3"]}',
)


def _drafters(_: click.Context, __: click.Parameter, values: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for value in values:
        name, equals, text = value.partition("=")
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            raise click.BadParameter(f"{value}: expected NAME=JSON, as of --speculative-config") from error
        if not equals or not isinstance(config, dict):
            raise click.BadParameter(f"{value}: expected NAME=JSON, as of --speculative-config")
        found[name] = config
    return found


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model")
@click.option(
    "--drafter",
    "drafters",
    metavar="NAME=JSON",
    multiple=True,
    default=DEFAULT_DRAFTERS,
    callback=_drafters,
    help="May be given several times. Default: the look-ups, and the head that is shipped for smollm2.",
)
@click.option("--far", is_flag=True, help="Draft in a process of its own, not in the verifier's.")
@click.option("--num-prompts", type=click.IntRange(1, 64), default=64, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=96, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True)
@click.option("--num-speculative-tokens", type=click.IntRange(1), default=4, show_default=True)
@files("markdown")
def acceptance(model: str, drafters: dict[str, Any], markdown_file: Path | None, **options: Any) -> None:
    """Measure tokens per verification of MODEL's drafters by kind of prompt."""
    results = [served for name, config in drafters.items() for served in measure(model, name, config, **options)]
    place = "a process of its own" if options["far"] else "the verifier's process"
    asked = f"{options['num_prompts']} prompts x {options['max_tokens']} tokens"
    drafts = f"drafts of at most {options['num_speculative_tokens']} in {place}"
    page = "\n".join([f"{describe_machine()}; {asked}, {drafts}; tokens per verification", "", *to_rows(results)])
    show_page(page, PLAIN_WIDTH, markdown_file)
