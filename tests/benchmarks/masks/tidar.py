"""`make study NAME=tidar ARGS="MODEL"`: what a model brings that drafts for itself by masks, beside itself without.

MODEL comes from `outrider train-drafter tidar`. Arms take turns: plain decoding twice (the second says what chance is),
masks for every outcome, for the two likeliest and for the likeliest one, and masks by price. Tokens of greedy and of
seeded requests must be those of plain decoding, or the study fails.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.drafter_service.embedded import held_out_prompts
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.same_tokens import Pair, Seeded, compare, plain_decoding, require_same
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.tokenizer import load_tokenizer

KV_BYTES = 64 << 20
PLAIN = "plain"
ARMS: Mapping[str, Mapping[str, Any] | None] = {
    PLAIN: None,
    "plain again": None,
    "masks for all outcomes": {},
    "masks for two": {"tidar_num_blocks": 2},
    "masks for one": {"tidar_num_blocks": 1},
    "by price": {},
}
PRICED = "by price"
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded, temperature 1": {"temperature": 1.0, "seed": 11},
    "unseeded, temperature 1": {"temperature": 1.0},
}


@dataclass(slots=True)
class Arm:
    """One way to serve, and what it gave by sampling."""

    offline: OfflineEngine
    plan: SpeculationPlan
    rates: dict[str, list[float]] = field(default_factory=dict)  # tokens/s of each repetition
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)  # of the last one
    num_rows: dict[str, int] = field(default_factory=dict)
    num_rounds: dict[str, int] = field(default_factory=dict)  # one for each request of each step that drew tokens
    num_drafted: dict[str, int] = field(default_factory=dict)
    num_accepted: dict[str, int] = field(default_factory=dict)

    def run(
        self,
        sampling: str,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        concurrency: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Serve all prompts, so many at a time."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **SAMPLINGS[sampling])
        num_rows = num_rounds = num_drafted = num_accepted = 0
        execute = self.offline.runner.execute

        def counted(batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
            nonlocal num_rows
            num_rows += batch.num_tokens
            return execute(batch, chosen)

        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        began_s = clock()
        self.offline.runner.execute = counted  # type: ignore[method-assign]
        for group in _groups(prompts, concurrency):
            requests = [
                GenerationRequest(
                    request_id=str(index), prompt_token_ids=tuple(prompt), sampling=params, plan=self.plan
                )
                for index, prompt in group
            ]
            for output in self.offline.generate(requests):
                tokens[output.request_id] += output.token_ids
                num_rounds += 1
                num_drafted += output.num_draft_tokens
                num_accepted += output.num_accepted_tokens
        seconds = clock() - began_s
        self.offline.runner.execute = execute  # type: ignore[method-assign]
        self.offline.engine.scheduler.flush_cache()
        self.tokens[sampling] = list(tokens.values())
        self.rates.setdefault(sampling, []).append(sum(map(len, tokens.values())) / seconds)
        self.num_rows[sampling], self.num_rounds[sampling] = num_rows, num_rounds
        self.num_drafted[sampling], self.num_accepted[sampling] = num_drafted, num_accepted


def _groups(prompts: Sequence[Sequence[int]], size: int) -> list[list[tuple[int, Sequence[int]]]]:
    numbered = list(enumerate(prompts))
    return [numbered[start : start + size] for start in range(0, len(numbered), size)]


def open_arms(model: str, *, draft_length: int, opening: ExitStack) -> dict[str, Arm]:
    """Load the model once for each arm."""
    arms: dict[str, Arm] = {}
    for name, options in ARMS.items():
        own: dict[str, Any] = {"num_drafters": 0}
        plan = SpeculationPlan()
        if options is not None:
            own = {"method": "tidar", "location": "verifier", "num_speculative_tokens": draft_length, **options}
            own = {"speculative_config": own}
            plan = SpeculationPlan(drafter_id=LOCAL_DRAFTER_ID, draft_length=draft_length, is_pinned=name != PRICED)
        config = ServiceConfig(model=model, seed=0, dtype="float32", kv_cache_memory_bytes=KV_BYTES, **own)
        arms[name] = Arm(opening.enter_context(OfflineEngine(config, prices_drafts=name == PRICED)), plan)
    return arms


def pairs_of(arms: Mapping[str, Arm], prompts: Sequence[Sequence[int]]) -> list[Pair]:
    """Return the other arms' answers beside plain decoding's, but for unseeded ones, which may be any."""
    return [
        Pair(
            what=f"{name}, {sampling}, prompt {index + 1}",
            prompt=prompts[index],
            expected=expected,
            given=arm.tokens[sampling][index],
            seeded=Seeded(**options) if "seed" in options else None,
        )
        for name, arm in arms.items()
        for sampling, options in SAMPLINGS.items()
        if name != PLAIN and (options["temperature"] == 0.0 or "seed" in options)
        for index, expected in enumerate(arms[PLAIN].tokens[sampling])
    ]


def to_markdown(arms: Mapping[str, Arm], num_prompt_rows: int) -> str:
    """Return the table: tokens a forward, the rows of a forward beside prompts', and tokens/s beside plain decoding."""
    rows = []
    for sampling in SAMPLINGS:
        for name, arm in arms.items():
            num_tokens = sum(map(len, arm.tokens[sampling]))
            of_plain = [
                own / plain for own, plain in zip(arm.rates[sampling], arms[PLAIN].rates[sampling], strict=True)
            ]
            rows.append(
                [
                    *(sampling, name, f"{num_tokens / arm.num_rounds[sampling]:.2f}"),
                    f"{arm.num_accepted[sampling]} of {arm.num_drafted[sampling]}",
                    f"{(arm.num_rows[sampling] - num_prompt_rows) / arm.num_rounds[sampling]:.1f}",
                    f"{median(arm.rates[sampling]):.0f}",
                    f"{median(of_plain):.2f} ({min(of_plain):.2f}-{max(of_plain):.2f})",
                ]
            )
    heads = ["sampling", "arm", "tokens / forward", "accepted", "rows / forward", "tokens/s", "of plain (range)"]
    return "\n".join(markdown_table(heads, rows, num_left=2))


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--prompts", "num_prompts", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=2), default=64, show_default=True)
@click.option("--concurrency", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--draft-length", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--processor-time", is_flag=True, help="Of a shared CPU: tokens per second of one thread's own time.")
def tidar(
    model: Path,
    num_prompts: int,
    max_tokens: int,
    concurrency: int,
    draft_length: int,
    repeats: int,
    processor_time: bool,
) -> None:
    """Serve held-out prompts with a model of `train-drafter tidar`: tokens per forward, tokens/s, and equality."""
    clock = time.perf_counter
    if processor_time:
        torch.set_num_threads(1)
        clock = time.process_time
    with ExitStack() as opening:
        arms = open_arms(str(model), draft_length=draft_length, opening=opening)
        target = arms[PLAIN].offline.config.verifier_spec.model
        tokenizer = load_tokenizer(target)
        prompts = [tokenizer.encode(prompt)[:128] for prompt in held_out_prompts()[:num_prompts]]
        for _, sampling, arm in itertools.product(range(repeats), SAMPLINGS, arms.values()):
            arm.run(sampling, prompts, max_tokens, concurrency, clock)
    console = console_of(160)
    console.print(f"{describe_machine()}")
    console.print(f"{num_prompts} prompts, {max_tokens} tokens each, {concurrency} at a time, {repeats} repeats")
    console.print(to_markdown(arms, sum(map(len, prompts)) - len(prompts)))
    tally = compare(pairs_of(arms, prompts), plain_decoding(target))
    console.print(f"Beside plain decoding: {tally}")
    require_same(tally)
