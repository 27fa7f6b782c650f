"""Measure a target and its drafter with plain transformers, without any of Outrider's own serving code.

    python -m outrider.lab.embedded.evaluate --card

Speculation is run for real, by the textbook: draft a chain, accept each token with probability
min(1, target_probs / draft_probs), recover the first rejected one from the residual, sample a bonus after a full
chain (Leviathan et al., 2023). At temperature 0 both distributions are one-hot and the same code compares argmaxes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from outrider.drafter_service.embedded import HERE, draft_path, held_out_prompts, target_path
from outrider.lab.embedded import corpus

MODEL_CARD = HERE / "MODEL_CARD.md"
WINDOW = 1024
NUM_NEW_TOKENS = 128
DRAFT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Speculation:
    """One prompt continued by speculative decoding: the new tokens, and how many each verification committed."""

    token_ids: tuple[int, ...]
    committed: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFigures:
    """What speculation with this pair gives at one temperature."""

    temperature: float
    mean_acceptance_length: float
    distinct_share: float
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFigures:
    """One model on its own."""

    name: str
    num_parameters: int
    bits_per_byte: float
    step_ms: float


@torch.inference_mode()
def bits_per_byte(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, sources: Sequence[corpus.Source]
) -> float:
    """Return the bits that the model needs per UTF-8 byte of `sources`.

    Every file begins with the end-of-text token and is read in windows of 1,024 tokens that do not overlap; every
    token is scored once, the first of a later window after one token of context.
    """
    nats, num_bytes = 0.0, 0
    for source in sources:
        ids = [tokenizer.eos_token_id, *tokenizer(source.text, add_special_tokens=False)["input_ids"]]
        num_bytes += len(source.text.encode())
        for start in range(0, len(ids) - 1, WINDOW):
            window = torch.tensor(ids[start : start + WINDOW + 1])  # [window + 1]
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]  # [window, vocab]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return nats / math.log(2) / num_bytes


def probs_of(model: LlamaForCausalLM, token_ids: Sequence[int], last: int, temperature: float) -> Tensor:
    """Return the sampling distributions after each of the `last` final tokens: [last, vocab]."""
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False, logits_to_keep=last).logits[0]
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    return (logits / temperature).softmax(-1)


def draft_chain(
    draft: LlamaForCausalLM, token_ids: Sequence[int], temperature: float, generator: torch.Generator
) -> tuple[list[int], Tensor]:
    """Sample `DRAFT_LENGTH` tokens and return them with the rows they came from: [draft_length, vocab]."""
    chain: list[int] = []
    rows: list[Tensor] = []
    for _ in range(DRAFT_LENGTH):
        row = probs_of(draft, [*token_ids, *chain], 1, temperature)[0]  # [vocab]
        chain.append(int(torch.multinomial(row, 1, generator=generator)))
        rows.append(row)
    return chain, torch.stack(rows)


def verify(chain: Sequence[int], draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator) -> list[int]:
    """Return the committed tokens: the accepted ones, then one recovered or bonus token.

    Shapes: draft_probs [draft_length, vocab], target_probs [draft_length + 1, vocab].
    """
    for position, token in enumerate(chain):
        ratio = target_probs[position, token] / draft_probs[position, token]
        if torch.rand((), generator=generator) >= ratio:
            residual = (target_probs[position] - draft_probs[position]).clamp_min(0)  # [vocab]
            return [*chain[:position], int(torch.multinomial(residual, 1, generator=generator))]
    return [*chain, int(torch.multinomial(target_probs[-1], 1, generator=generator))]


@torch.inference_mode()
def speculate(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: Sequence[int], temperature: float, seed: int
) -> Speculation:
    """Continue a prompt by `NUM_NEW_TOKENS`; text past an end-of-text token counts, as the law there is the same."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = list(prompt)
    committed: list[int] = []
    while sum(committed) < NUM_NEW_TOKENS:
        chain, draft_probs = draft_chain(draft, token_ids, temperature, generator)
        target_probs = probs_of(target, [*token_ids, *chain], DRAFT_LENGTH + 1, temperature)
        fresh = verify(chain, draft_probs, target_probs, generator)
        token_ids += fresh
        committed.append(len(fresh))
    return Speculation(tuple(token_ids[len(prompt) :][:NUM_NEW_TOKENS]), tuple(committed))


def distinct_share(token_ids: Sequence[int], size: int = 4) -> float:
    """Return the distinct n-grams ÷ all n-grams of one text; text that loops comes near 0."""
    grams = [tuple(token_ids[i : i + size]) for i in range(len(token_ids) - size + 1)]
    return len(set(grams)) / len(grams)


def measure_pair(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Sequence[Sequence[int]], temperature: float
) -> PairFigures:
    """Continue every prompt speculatively and pool the rounds of all."""
    runs = [
        speculate(target, draft, prompt, temperature, seed)
        for seed, prompt in enumerate(track(prompts, description=f"temperature {temperature}"))
    ]
    committed = [length for run in runs for length in run.committed]
    return PairFigures(
        temperature=temperature,
        mean_acceptance_length=mean(committed),
        distinct_share=mean(distinct_share(run.token_ids) for run in runs),
        num_rounds=len(committed),
    )


@torch.inference_mode()
def step_ms(model: LlamaForCausalLM, num_steps: int = 100) -> float:
    """Return the median time of decoding one token behind a key-value cache, in milliseconds."""
    output = model(input_ids=torch.zeros(1, 64, dtype=torch.long), use_cache=True)
    times: list[float] = []
    for _ in range(num_steps):
        started_s = time.perf_counter()
        model(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=output.past_key_values)
        times.append(time.perf_counter() - started_s)
    return median(times) * 1000


def measure_model(
    name: str, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, sources: Sequence[corpus.Source]
) -> ModelFigures:
    """Measure one model's quality, size and step time."""
    return ModelFigures(
        name=name,
        num_parameters=model.num_parameters(),
        bits_per_byte=bits_per_byte(model, tokenizer, sources),
        step_ms=step_ms(model),
    )


def load_model(folder: Path) -> LlamaForCausalLM:
    """Load a shipped model in float32 for evaluation."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def as_markdown(models: Sequence[ModelFigures], pairs: Sequence[PairFigures]) -> str:
    """Render the figures as the two tables of the model card."""
    lines = ["| model | parameters | bits per byte, held out | one decoding step |", "|---|---|---|---|"]
    lines += [f"| {m.name} | {m.num_parameters:,} | {m.bits_per_byte:.3f} | {m.step_ms:.1f} ms |" for m in models]
    lines += ["", "| temperature | mean acceptance length | distinct 4-grams | verifications |", "|---|---|---|---|"]
    lines += [
        f"| {p.temperature:g} | {p.mean_acceptance_length:.2f} | {p.distinct_share:.2f} | {p.num_rounds:,} |"
        for p in pairs
    ]
    return "\n".join(lines) + "\n"


def write_card(figures: str) -> None:
    """Put the figures into the model card, between its two markers."""
    before, opening, rest = MODEL_CARD.read_text().partition("<!-- figures -->\n")
    _, closing, after = rest.partition("<!-- /figures -->")
    MODEL_CARD.write_text(before + opening + figures + closing + after)


@click.command()
@click.option("--target", "target_folder", type=click.Path(path_type=Path), default=target_path())
@click.option("--draft", "draft_folder", type=click.Path(path_type=Path), default=draft_path())
@click.option("--prompts", "num_prompts", default=24, show_default=True, help="How many held-out prompts to continue.")
@click.option("--card", is_flag=True, help="Write the figures into MODEL_CARD.md.")
def main(target_folder: Path, draft_folder: Path, num_prompts: int, card: bool) -> None:
    """Measure held-out loss, mean acceptance length and repetition of the embedded pair."""
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    target, draft = load_model(target_folder), load_model(draft_folder)
    sources = corpus.load_split().held_out
    prompts = [tokenizer(prompt)["input_ids"] for prompt in held_out_prompts()[:num_prompts]]
    models = [measure_model(name, m, tokenizer, sources) for name, m in (("target", target), ("drafter", draft))]
    figures = as_markdown(models, [measure_pair(target, draft, prompts, t) for t in (0.0, 0.8)])
    Console().print(Markdown(figures))
    if card:
        write_card(figures)


if __name__ == "__main__":
    main()
