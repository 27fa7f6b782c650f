"""`make study NAME=exact ARGS="MODEL"`: are a real model's tokens the same in any company, with drafts as without?

The committed prompts through the model's chat template, greedy and seeded. Plain decoding of one request at a time is
what all the rest is held against: several at a time, drafts of a fixed length that look-ups make, and each prompt once
more, when the prefix cache knows it: computed in one chunk and behind a hit it must leave the same. What the same is:
`outrider.lab.same_tokens`. Each row is judged by itself, and the command fails where one does not hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import markdown_table, numbers, show_progress
from outrider.cluster.offline.engine import OfflineEngine
from outrider.cluster.offline.llm import planned_config
from outrider.lab.chat_prompts import encoded_prompts
from outrider.lab.head.acceptance import SAMPLINGS, Prompts
from outrider.lab.report import describe_machine, files, show_page
from outrider.lab.same_tokens import Pair, Seeded, Tally, compare, plain_decoding, require_same
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

PLAIN_WIDTH = 160
DRAFT_LENGTH = 4
DRAFTS = {"off": 0, "on": DRAFT_LENGTH}
CACHES = ("cold", "warm")
HEADINGS = ("sampling", "drafts", "at a time", "cache", "answers", "identical", "near ties", "different")
COUNTS = ("accepted draft tokens", "prompt tokens cached")


@dataclass(slots=True)
class Run:
    """All prompts, once."""

    sampling: str
    drafts: str
    at_a_time: int
    cache: str
    tokens: list[list[int]]
    num_accepted: int = 0  # draft tokens: with none drafts were not tried
    num_cached: int = 0  # tokens of prompts: with none the cache was not

    def __str__(self) -> str:
        return f"{self.sampling}, drafts {self.drafts}, {self.at_a_time} at a time, cache {self.cache}"


@dataclass(frozen=True, slots=True)
class Row:
    """A run beside plain decoding."""

    run: Run
    tally: Tally

    @property
    def cells(self) -> list[str]:
        run, tally = self.run, self.tally
        counts = (tally.num_answers, tally.num_identical, tally.num_tipped, tally.num_different)
        names = (run.sampling, run.drafts, str(run.at_a_time), run.cache)
        return [*names, *map(str, (*counts, run.num_accepted, run.num_cached))]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--quantization", type=click.Choice(["int8"]))
@click.option("--kv-cache-dtype", type=click.Choice(["auto", "fp8"]), default="auto", show_default=True)
@click.option("--num-prompts", type=click.IntRange(1, 64), default=64, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--concurrency", "concurrencies", default="1,8,16", show_default=True, callback=numbers)
@files("markdown")
def exact(model: str, markdown_file: Path | None, **options: Any) -> None:
    """Compare MODEL's tokens with drafts on and off, in company and behind a prefix cache; fails where they differ."""
    rows = measure(model, **options)
    text = "\n".join(markdown_table((*HEADINGS, *COUNTS), [row.cells for row in rows], num_left=2))
    held = f"{options['quantization'] or 'weights as they are'}, KV {options['kv_cache_dtype']}"
    page = f"{describe_machine()}; {options['dtype']}, {held}\n\n{text}"
    show_page(page, PLAIN_WIDTH, markdown_file)
    require_same(*(row.tally for row in rows))


def measure(
    model: str, *, concurrencies: Sequence[int], num_prompts: int, max_tokens: int, **served: str | None
) -> list[Row]:
    """Generate in every way; `served`: dtype, quantization, dtype of the KV."""
    config, _ = planned_config({"model": model, "speculation": "off", **served}, drafter_process=False)
    target = config.verifier_spec.model
    prompts = encoded_prompts(target)[:num_prompts]
    runs: list[Run] = []
    ways = [(drafts, at_a_time) for drafts in DRAFTS for at_a_time in sorted({1, *concurrencies})]
    with show_progress(len(ways) * len(CACHES) * len(SAMPLINGS)) as on_run:
        for drafts, at_a_time in ways:
            runs += _runs(model, prompts, drafts, at_a_time, max_tokens, served, on_run)
    plain = {run.sampling: run for run in runs if (run.drafts, run.at_a_time, run.cache) == ("off", 1, "cold")}
    load = plain_decoding(target)
    return [Row(run, compare(pairs_of(run, plain[run.sampling], prompts), load)) for run in runs]


def pairs_of(run: Run, plain: Run, prompts: Prompts) -> list[Pair]:
    """Return each answer of a run beside plain decoding's."""
    temperature = SAMPLINGS[run.sampling]
    return [
        Pair(
            what=f"{run}, prompt {seed + 1}",
            prompt=prompt,
            expected=plain.tokens[seed],
            given=run.tokens[seed],
            seeded=Seeded(seed=seed, temperature=temperature) if temperature else None,
        )
        for seed, prompt in enumerate(prompts)
    ]


def _runs(
    model: str,
    prompts: Prompts,
    drafts: str,
    at_a_time: int,
    max_tokens: int,
    served: Mapping[str, str | None],
    on_run: Callable[[str], None],
) -> Iterator[Run]:
    """Load a model; run all prompts by each sampling, and all again while the prefix cache knows them."""
    drafting = {"method": "ngram", "location": "verifier", "prompt_lookup_min": 1}
    options: dict[str, Any] = {"speculative_config": drafting, "num_speculative_tokens": DRAFT_LENGTH}
    options |= {"max_num_seqs": at_a_time, "speculation": "always", **served}
    config, _ = planned_config({"model": model, **options}, drafter_process=False)
    plan = SpeculationPlan(draft_length=DRAFTS[drafts], is_pinned=True)
    with OfflineEngine(config) as offline:
        for sampling, temperature in SAMPLINGS.items():
            for cache in CACHES:
                run = Run(sampling, drafts, at_a_time, cache, [[] for _ in prompts])
                on_run(str(run))
                law = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=temperature)
                requests = [
                    GenerationRequest(
                        request_id=str(seed),
                        prompt_token_ids=prompt,
                        sampling=dataclasses.replace(law, seed=seed) if temperature else law,
                        plan=plan,
                        cache_salt=f"{sampling} {seed}",  # prompts begin alike: none may find another one's beginning
                    )
                    for seed, prompt in enumerate(prompts)
                ]
                for output in offline.generate(requests):
                    if output.error is not None:
                        raise click.ClickException(f"{run}, prompt {output.request_id}: {output.error}")
                    run.tokens[int(output.request_id)] += output.token_ids
                    run.num_accepted += output.num_accepted_tokens
                    run.num_cached += output.num_cached_tokens if output.finish_reason else 0
                yield run
