"""`make study NAME=acceptance ARGS="smollm2 --drafter ..."`: what a verification brings, by kind of prompt.

The committed prompts through the model's chat template, always drafted, greedy and sampled. A drafter's figure is the
tokens that a verification commits, rounds without a draft included: what training reports of windows of text is another
matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.exact import encoded_prompts, generated
from outrider.cluster import RequestOutput
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import NOTHING, console_of, markdown_table
from outrider.cluster.config.known_models import path_of
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.peers.measure import PROMPTS
from outrider.verifier_service.messages.request import SpeculationMetrics
from outrider.verifier_service.model.config import ModelConfig

ALL = "all"
PLAIN_WIDTH = 160
DEFAULT_DRAFTERS = (
    'n-gram={"method": "ngram", "prompt_lookup_min": 1}',
    'suffix={"method": "suffix"}',
    'EAGLE-3={"method": "eagle3"}',
    'EAGLE-3, tree={"method": "eagle3", "num_tree_nodes": 16}',
    'suffix or EAGLE-3={"method": "hybrid", "methods": ["suffix", "eagle3"]}',
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one drafter brought with one kind of sampling."""

    drafter: str
    sampling: str
    by_kind: Mapping[str, SpeculationMetrics]

    def tokens_per_verification(self, kind: str) -> float | None:
        """Return how many tokens a verification committed; None where there was none."""
        chosen = self.by_kind.values() if kind == ALL else [self.by_kind[kind]]
        rounds = sum(each.num_drafts + each.num_empty_rounds for each in chosen)
        return 1 + sum(each.num_accepted_tokens for each in chosen) / rounds if rounds else None


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
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def acceptance(model: str, drafters: dict[str, Any], markdown_file: Path | None, **options: Any) -> None:
    """Measure tokens per verification of MODEL's drafters by kind of prompt."""
    results = [served for name, config in drafters.items() for served in measure(model, name, config, **options)]
    place = "a process of its own" if options["far"] else "the verifier's process"
    asked = f"{options['num_prompts']} prompts x {options['max_tokens']} tokens"
    drafts = f"drafts of at most {options['num_speculative_tokens']} in {place}"
    page = "\n".join([f"{describe_machine()}; {asked}, {drafts}; tokens per verification", "", *to_rows(results)])
    console_of(PLAIN_WIDTH).print(page, highlight=False)
    if markdown_file is not None:
        markdown_file.write_text(f"{page}\n")


def to_rows(results: Sequence[Served]) -> list[str]:
    """Write a Markdown table: a row for each drafter and sampling, a column for each kind of prompt."""
    kinds = [ALL, *results[0].by_kind]
    rows = [[each.drafter, each.sampling, *(_figure(each, kind) for kind in kinds)] for each in results]
    return markdown_table(["drafter", "sampling", *kinds], rows, num_left=2)


def _figure(served: Served, kind: str) -> str:
    tokens = served.tokens_per_verification(kind)
    return NOTHING if tokens is None else f"{tokens:.2f}"


def measure(
    model: str,
    name: str,
    config: Mapping[str, Any],
    *,
    far: bool,
    num_prompts: int,
    max_tokens: int,
    concurrency: int,
    num_speculative_tokens: int,
) -> list[Served]:
    """Serve all prompts with one drafter."""
    kinds = [json.loads(line)["kind"] for line in PROMPTS.read_text().splitlines()][:num_prompts]
    prompts = encoded_prompts(ModelConfig(path=path_of(model)))[:num_prompts]
    location = {} if far else {"location": "verifier"}
    found = generated(
        model,
        prompts,
        {"max_tokens": max_tokens},
        speculative_config={**location, **config},
        num_speculative_tokens=num_speculative_tokens,
        speculation="always",
        max_num_seqs=concurrency,
        drafter_process=far,
    )
    return [
        Served(drafter=name, sampling=sampling, by_kind=_by_kind(kinds, outputs)) for sampling, outputs in found.items()
    ]


def _by_kind(kinds: Sequence[str], outputs: Sequence[RequestOutput]) -> dict[str, SpeculationMetrics]:
    sums: dict[str, SpeculationMetrics] = {}
    for kind, output in zip(kinds, outputs, strict=True):
        sums[kind] = sums[kind].plus(output.metrics) if kind in sums else output.metrics
    return sums
