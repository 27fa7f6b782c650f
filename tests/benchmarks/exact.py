"""`make study NAME=exact ARGS="MODEL"`: are a real model's tokens the same with drafts as without?

The committed prompts through the model's chat template, greedy and seeded, several at a time: first without
speculation, then with drafts of a fixed length that look-ups make. In float32 all tokens must be identical. In bfloat16
a prompt may leave at a near tie: where plain decoding's two largest logits, noise added if seeded, differ by at most
2⁻⁷ of the largest logit. Those are counted; anything else is an error, and the command fails.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from outrider.cluster import RequestOutput
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.cluster.config.known_models import path_of
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.head.acceptance import SAMPLINGS, TEMPERATURE, Prompts, encoded_prompts, generated
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.sampling.coupled_sampler import NOISE_FRACTION_BITS, gumbel_noise

NEAR_TIE = 2.0**-7  # of the largest |logit|
MOST_NEAR_TIES = 0.05  # of the prompts
PLAIN_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How many prompts of one kind of sampling gave the same tokens, and where the others left."""

    sampling: str
    num_prompts: int
    num_near_ties: int
    num_different: int  # for no reason
    num_accepted: int  # draft tokens: with none nothing was tried

    @property
    def holds(self) -> bool:
        return self.num_different == 0 and self.num_near_ties <= MOST_NEAR_TIES * self.num_prompts


class Reference:
    """Plain decoding's logits for any prefix."""

    def __init__(self, config: ModelConfig) -> None:
        whole = dataclasses.replace(config, num_kv_blocks=256, check_logits=False)
        self._runner = ModelRunner(whole, TensorParallelGroup.single())
        self.dtype = self._runner.dtype

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return what follows a text: float32 [vocab_size]."""
        length, size = len(token_ids), self._runner.block_size
        batch = ScheduledBatch(
            token_ids=list(token_ids),
            positions=list(range(length)),
            slot_mapping=list(range(length)),
            query_lengths=[length],
            context_lengths=[length],
            block_tables=[list(range(-(-length // size)))],
            logits_indices=[length - 1],
        )
        return self._runner.execute(batch)[0]


def is_near_tie(logits: torch.Tensor, noise: torch.Tensor | None = None) -> bool:
    """Tell whether the two likeliest tokens are so near that rounding may decide: both [vocab_size]."""
    best, second = (logits if noise is None else logits + noise).topk(2).values.tolist()
    return best - second <= NEAR_TIE * logits.abs().max().item()


def noise_of(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Return the noise of a seeded request at a position, in units of its logits: [vocab_size]."""
    noise = gumbel_noise(seed, 0, torch.tensor([position]), vocab_size, "cpu")[0]
    return noise.double() * (TEMPERATURE * math.log(2) / (1 << NOISE_FRACTION_BITS))


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True)
@click.option("--quantization", type=click.Choice(["int8"]))
@click.option("--num-prompts", type=click.IntRange(1, 64), default=64, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True)
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def exact(model: str, markdown_file: Path | None, **options: Any) -> None:
    """Compare MODEL's tokens with drafts on and off; fails where they differ for no reason."""
    outcomes = compare(model, **options)
    headings = ("sampling", "prompts", "identical", "near ties", "different", "accepted draft tokens")
    rows = [
        (
            own.sampling,
            *map(str, (own.num_prompts, own.num_prompts - own.num_near_ties - own.num_different)),
            *map(str, (own.num_near_ties, own.num_different, own.num_accepted)),
        )
        for own in outcomes
    ]
    text = "\n".join(markdown_table(headings, rows, num_left=1))
    page = f"{describe_machine()}; {options['dtype']}\n\n{text}"
    console_of(PLAIN_WIDTH).print(page, highlight=False)
    if markdown_file is not None:
        markdown_file.write_text(f"{page}\n")
    if not all(own.holds for own in outcomes):
        raise click.ClickException("tokens differ for no reason, or at too many near ties")


def compare(
    model: str, *, dtype: str, num_prompts: int, max_tokens: int, concurrency: int, quantization: str | None = None
) -> list[Outcome]:
    """Generate with drafts off and on, greedy and seeded."""
    config = ModelConfig(path=path_of(model), dtype=dtype, quantization=quantization)
    prompts = encoded_prompts(config)[:num_prompts]
    shared = {"dtype": dtype, "quantization": quantization, "max_num_seqs": concurrency}
    drafting = {"method": "ngram", "location": "verifier", "prompt_lookup_min": 1}
    fields = {"max_tokens": max_tokens, "ignore_eos": True}
    plain = generated(model, prompts, fields, speculation="off", **shared)
    drafted = generated(model, prompts, fields, speculation="always", speculative_config=drafting, **shared)
    reference = Reference(config)
    return [_outcome(name, prompts, plain[name], drafted[name], reference) for name in SAMPLINGS]


def _outcome(
    name: str, prompts: Prompts, plain: list[RequestOutput], drafted: list[RequestOutput], reference: Reference
) -> Outcome:
    num_near_ties = num_different = 0
    for index, (prompt, own, other) in enumerate(zip(prompts, plain, drafted, strict=True)):
        expected, got = own.outputs[0].token_ids, other.outputs[0].token_ids
        at = next((at for at, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]), None)
        if at is None:
            continue
        logits = reference.logits([*prompt, *expected[:at]])
        noise = None if name == "greedy" else noise_of(index, len(prompt) + at, len(logits))
        if reference.dtype != torch.float32 and is_near_tie(logits, noise):
            num_near_ties += 1
        else:
            num_different += 1
    return Outcome(
        sampling=name,
        num_prompts=len(prompts),
        num_near_ties=num_near_ties,
        num_different=num_different,
        num_accepted=sum(output.metrics.num_accepted_tokens for output in drafted),
    )
