"""Served acceptance: the tokens that a verification commits, by kind of prompt, with our engine verifying.

The committed prompts through the model's chat template, always drafted, greedy and sampled. Rounds without a draft
count as a verification that brought one token: what training reports of windows of text is another matter.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.cluster.common.terminal import NOTHING, markdown_table
from outrider.cluster.config.known_models import path_of
from outrider.cluster.offline.llm import LLM
from outrider.cluster.offline.outputs import RequestOutput
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.drafter_service.training.served import Rounds
from outrider.lab.chat_prompts import PROMPTS, encoded_prompts
from outrider.verifier_service.messages.request import SpeculationMetrics
from outrider.verifier_service.model.config import ModelConfig

ALL = "all"
TEMPERATURE = 0.8
SAMPLINGS = {"greedy": 0.0, "seeded": TEMPERATURE}  # temperatures; the seed is the prompt's number

Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What one drafter brought with one kind of sampling."""

    drafter: str
    sampling: str
    by_kind: Mapping[str, Rounds]

    def tokens_per_verification(self, kind: str) -> float | None:
        """Return how many tokens a verification committed; None where there was none."""
        chosen = self.by_kind.values() if kind == ALL else [self.by_kind[kind]]
        total = _sum(chosen)
        return total.mean_acceptance_length if total.num_rounds else None


def to_rows(results: Sequence[Served]) -> list[str]:
    """Write a Markdown table: a row for each drafter and sampling, a column for each kind of prompt."""
    kinds = [ALL, *results[0].by_kind]
    rows = [[each.drafter, each.sampling, *(figure(each, kind) for kind in kinds)] for each in results]
    return markdown_table(["drafter", "sampling", *kinds], rows, num_left=2)


def figure(served: Served, kind: str) -> str:
    """Write tokens per verification."""
    tokens = served.tokens_per_verification(kind)
    return NOTHING if tokens is None else f"{tokens:.2f}"


def measure(
    model: str,
    name: str,
    config: Mapping[str, Any],
    *,
    far: bool = False,
    num_prompts: int,
    max_tokens: int,
    concurrency: int,
    num_speculative_tokens: int = 4,
    **engine: Any,
) -> list[Served]:
    """Serve the held-out prompts with one drafter; `engine` is of `LLM`'s options."""
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
        **engine,
    )
    return [
        Served(drafter=name, sampling=sampling, by_kind=_by_kind(kinds, outputs)) for sampling, outputs in found.items()
    ]


def generated(
    model: str, prompts: Prompts, fields: Mapping[str, Any], **options: Any
) -> dict[str, list[RequestOutput]]:
    """Return what a model loaded with `options` makes of all prompts, by each kind of sampling."""
    with contextlib.closing(LLM(model, **options)) as llm:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return {
            name: llm.generate(asked, [_sampling(fields, temperature, seed) for seed in range(len(prompts))])
            for name, temperature in SAMPLINGS.items()
        }


def _sampling(fields: Mapping[str, Any], temperature: float, seed: int) -> SamplingParams:
    return SamplingParams(**fields, temperature=temperature, seed=seed if temperature else None)


def _by_kind(kinds: Sequence[str], outputs: Sequence[RequestOutput]) -> dict[str, Rounds]:
    found: dict[str, list[Rounds]] = {}
    for kind, output in zip(kinds, outputs, strict=True):
        found.setdefault(kind, []).append(rounds_of(output.metrics))
    return {kind: _sum(rounds) for kind, rounds in found.items()}


def rounds_of(metrics: SpeculationMetrics) -> Rounds:
    """Return a request's verifications; a round without a draft is one that brought a single token."""
    num_rounds = metrics.num_drafts + metrics.num_empty_rounds
    return Rounds(num_rounds=num_rounds, num_committed=num_rounds + metrics.num_accepted_tokens)


def _sum(parts: Iterable[Rounds]) -> Rounds:
    all_of_them = list(parts)
    return Rounds(
        num_rounds=sum(each.num_rounds for each in all_of_them),
        num_committed=sum(each.num_committed for each in all_of_them),
    )
