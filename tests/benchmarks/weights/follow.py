"""`make study NAME=follow`: GRPO moves the policy; does a drafter that learns follow it?

A service of MODEL with `--rollouts`, without a learner and with one. examples/grpo.py's trainer takes five steps. Its
rollouts between two updates are asked for in several batches, as a trainer waits for the longest of many: the first
batch after an update is drafted by a drafter that has not seen the new policy, the last one by what has been learned
meanwhile. All rollouts are seeded: both services draw the same tokens, which is checked by the rewards. Learning off is
run twice; the second is the placebo.
"""

from __future__ import annotations

import json
import runpy
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.weights.served_model import serving
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.cluster.config.known_models import path_of
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.same_tokens import num_identical
from outrider.verifier_service.model.gguf import local_path

PLAIN_WIDTH = 120
OFF, ON, PLACEBO = "off", "on", "off again"
EXAMPLE = Path(__file__).parents[3] / "examples" / "grpo.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step's rollouts between two updates."""

    reward: float
    after: float  # tokens per verification in the first batch after an update
    before: float  # in the last batch before the next
    version: str  # of the drafter, at the end
    tokens: Sequence[Sequence[int]]  # of all answers


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", default="embedded")
@click.option("--config", "speculative", default='{"method": "draft_model"}', show_default=True, help="As `-sc`.")
@click.option("--learner", default='{"min_samples": 32}', show_default=True, help="As `--learner`, without the folder.")
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True)
@click.option("--batches", type=click.IntRange(2), default=6, show_default=True, help="Of rollouts, between updates.")
@click.option("--n", type=click.IntRange(2), default=8, show_default=True, help="Answers to each prompt of a batch.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--lr", default=3e-3, show_default=True, help="For the embedded target; 1e-4 for smollm2.")
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def follow(model: str, speculative: str, learner: str, markdown_file: Path | None, **options: Any) -> None:
    """Train a policy through a service whose drafters learn, and through one whose drafters do not."""
    arms: dict[str, list[Step]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in (OFF, ON, PLACEBO):
            serve = ["--rollouts", "-sc", speculative, "--speculation", "always", "--dtype", "float32"]
            if name == ON:
                serve += ["--learner", json.dumps(json.loads(learner) | {"folder": f"{folder}/learner"})]
            with serving(model, serve, Path(folder) / f"{name}.log") as http:
                arms[name] = list(train(model, http, **options))
    page = to_page(f"{model}, {speculative}, {learner}, {options}", arms)
    console_of(PLAIN_WIDTH).print(page, highlight=False)
    if markdown_file is not None:
        markdown_file.write_text(f"{page}\n")
    for name, steps in arms.items():  # float32; the weights that drew them are gone: nobody can be asked for a margin
        for number, (step, plain) in enumerate(zip(steps, arms[OFF], strict=True)):
            if num_identical(step.tokens, plain.tokens) < len(plain.tokens):
                raise click.ClickException(f"{name}: in step {number + 1} other tokens were drawn")


def train(
    model: str,
    http: httpx.Client,
    *,
    steps: int,
    batches: int,
    n: int,
    max_tokens: int,
    temperature: float,
    lr: float,
) -> Sequence[Step]:
    """Take steps of GRPO through a running service."""
    grpo = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
    torch.manual_seed(0)
    checkpoint = local_path(path_of(model))
    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompts = grpo.tokenised(AutoTokenizer.from_pretrained(checkpoint))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, weight_decay=0.0)
    rollouts, found = grpo.SglangClient(str(http.base_url)), []
    for number in range(steps):
        sampling = {"temperature": temperature, "max_tokens": max_tokens}
        drawn = [
            rollouts.sample(prompts, n, sampling | {"seed": 1000 * number + batch * n * len(prompts)})
            for batch in range(batches)
        ]
        samples = drawn[-1]
        rewards = torch.tensor([grpo.reward(sample.text) for sample in samples]).view(-1, n)
        grpo.learn(policy, optimizer, samples, grpo.advantages(rewards).flatten().tolist(), temperature)
        everything = [grpo.reward(sample.text) for batch in drawn for sample in batch]
        found.append(
            Step(
                reward=statistics.fmean(everything),
                after=tokens_per_verification(drawn[0]),
                before=tokens_per_verification(drawn[-1]),
                version=_drafter_version(http),
                tokens=[sample.token_ids for batch in drawn for sample in batch],
            )
        )
        rollouts.update(policy, f"step {number + 1}")
    return found


def tokens_per_verification(samples: Sequence[Any]) -> float:
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    return num_tokens / (num_tokens - sum(sample.num_accepted for sample in samples))


def to_page(title: str, arms: dict[str, list[Step]]) -> str:
    """Return a table with a row per step."""
    headings = ("step", "reward", *(f"{name}: {when}" for name in arms for when in ("after", "before")), "version")
    rows = [
        (
            str(number + 1),
            f"{arms[OFF][number].reward:.3f}",
            *(f"{value:.3f}" for steps in arms.values() for value in (steps[number].after, steps[number].before)),
            arms[ON][number].version,
        )
        for number in range(len(arms[OFF]))
    ]
    said = "after: tokens per verification just after an update; before: just before the next"
    return "\n".join([f"{describe_machine()}; {title}", "", said, "", *markdown_table(headings, rows, num_left=1)])


def _drafter_version(http: httpx.Client) -> str:
    answer = http.get("/v1/learner")
    if answer.status_code != 200:
        return ""
    return ", ".join(learner["serving"] for learner in answer.json()["data"])
