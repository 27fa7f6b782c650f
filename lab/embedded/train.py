"""Train the embedded pair: a Llama-style target on the standard library, then a drafter distilled from it.

    python -m outrider.lab.embedded.train

    pretrain (cross-entropy, in the end with a penalty on loops) ─> target/ ─> distil (KL) ─> draft/

The budget is time, not steps: the learning rate is a function of the elapsed share of the budget, so a run on a busy
machine still ends annealed. Checkpoints hold that elapsed time; the same command resumes where it was stopped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from rich.logging import RichHandler
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.drafter_service.embedded import draft_path, target_path
from outrider.drafter_service.training.draft_model import export
from outrider.drafter_service.training.precision import half_precision
from outrider.drafter_service.training.recipe import Optimizers, Phase, Progress, Recipe
from outrider.lab.embedded import corpus
from outrider.lab.embedded.unlikelihood import LoopPenalty

log = logging.getLogger(__name__)

LossFunction = Callable[[LlamaForCausalLM, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The dimensions of one Llama-style model; embeddings are tied."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    def build(self) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=corpus.VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=corpus.MAX_LENGTH,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
        return LlamaForCausalLM(config)


TARGET_SHAPE = Shape(hidden_size=256, intermediate_size=704, num_layers=6, num_heads=8, num_kv_heads=4)
DRAFT_SHAPE = Shape(hidden_size=128, intermediate_size=352, num_layers=2, num_heads=4, num_kv_heads=2)


@dataclass(frozen=True, slots=True)
class Streams:
    """The encoded training text, one long row of tokens per part: [num_tokens] each."""

    library: Tensor
    tests: Tensor

    def batch(self, step: int, phase: Phase, recipe: Recipe) -> Tensor:
        """Draw the windows of one step, a function of seed and step alone: [rows, window + 1]."""
        generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
        from_tests = torch.rand(phase.rows, generator=generator) < recipe.test_share  # [rows]
        rows = [self._window(self.tests if test else self.library, phase, generator) for test in from_tests.tolist()]
        return torch.stack(rows).long()

    @staticmethod
    def _window(stream: Tensor, phase: Phase, generator: torch.Generator) -> Tensor:
        start = int(torch.randint(len(stream) - phase.window - 1, (), generator=generator))
        return stream[start : start + phase.window + 1]


def logits_of(model: LlamaForCausalLM, token_ids: Tensor) -> Tensor:
    """Return the logits after each token: [rows, window] -> float32 [rows, window, vocab]."""
    with half_precision(token_ids.device):
        return model(input_ids=token_ids, use_cache=False).logits.float()


def cross_entropy(model: LlamaForCausalLM, batch: Tensor) -> Tensor:
    """Return the mean next-token loss in nats over a batch of [rows, window + 1] tokens."""
    logits = logits_of(model, batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def distillation_from(target: LlamaForCausalLM) -> LossFunction:
    """Return the loss that pulls a drafter's distribution to the target's: KL(target || draft), mean over positions."""

    def loss(draft: LlamaForCausalLM, batch: Tensor) -> Tensor:
        with torch.no_grad():
            target_logprobs = logits_of(target, batch[:, :-1]).log_softmax(-1).flatten(0, 1)  # [num_tokens, vocab]
        draft_logprobs = logits_of(draft, batch[:, :-1]).log_softmax(-1).flatten(0, 1)  # [num_tokens, vocab]
        return F.kl_div(draft_logprobs, target_logprobs, log_target=True, reduction="batchmean")

    return loss


@dataclass(slots=True)
class Run:
    """One model on its way through its recipe, with the file that it resumes from."""

    model: LlamaForCausalLM
    recipe: Recipe
    checkpoint: Path
    streams: Streams
    loss_function: LossFunction
    penalty: LossFunction | None = None  # joins the loss late in the budget

    def train(self) -> None:
        """Train until the budget is used up; resume from the checkpoint where there is one."""
        optimizers, progress = Optimizers(self.model, self.recipe), Progress()
        self._resume(optimizers, progress)
        saved_at_s = progress.elapsed_s
        for losses in self._steps(optimizers, progress):
            if progress.step % self.recipe.log_every == 0:
                self._log(progress, losses)
            if progress.elapsed_s - saved_at_s > self.recipe.checkpoint_every_s:
                self._save(optimizers, progress)
                saved_at_s = progress.elapsed_s
        self._save(optimizers, progress)

    def _steps(self, optimizers: Optimizers, progress: Progress) -> Iterator[list[Tensor]]:
        budget_s = self.recipe.minutes * 60
        while progress.elapsed_s < budget_s:
            started_s = time.perf_counter()
            share = progress.elapsed_s / budget_s
            batch = self.streams.batch(progress.step, self.recipe.phase(share), self.recipe)
            losses = self._backward(batch, share)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizers.step(self.recipe.lr_scale(progress.step, share))
            progress.step += 1
            progress.num_tokens += batch[:, 1:].numel()
            progress.elapsed_s += time.perf_counter() - started_s
            yield losses

    def _backward(self, batch: Tensor, elapsed_share: float) -> list[Tensor]:
        functions: list[LossFunction] = [self.loss_function]
        losses: list[Tensor] = []
        if self.penalty is not None and self.recipe.is_penalised(elapsed_share):
            functions.append(self.penalty)
        for function in functions:
            loss = function(self.model, batch)
            loss.backward()  # one graph at a time: half the memory
            losses.append(loss.detach())
        return losses

    def _log(self, progress: Progress, losses: list[Tensor]) -> None:
        log.info(
            "step %d, %.1f of %.1f min, %d tokens, loss %s",
            progress.step, progress.elapsed_s / 60, self.recipe.minutes, progress.num_tokens,
            " + ".join(f"{loss.item():.3f}" for loss in losses),
        )  # fmt: skip

    def _save(self, optimizers: Optimizers, progress: Progress) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": optimizers.state_dict(),
            "progress": (progress.step, progress.elapsed_s, progress.num_tokens),
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def _resume(self, optimizers: Optimizers, progress: Progress) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        optimizers.load_state_dict(state["optimizers"])
        progress.step, progress.elapsed_s, progress.num_tokens = state["progress"]
        log.info("resuming %s at step %d", self.checkpoint, progress.step)


def prepare(work: Path) -> tuple[PreTrainedTokenizerFast, Streams]:
    """Return tokenizer and training streams, made once and kept in the work folder."""
    folder, encoded = work / "tokenizer", work / "streams.pt"
    if not encoded.exists():
        split = corpus.load_split()
        tokenizer = corpus.train_tokenizer(split)
        tokenizer.save_pretrained(folder, save_jinja_files=False)
        streams = {"library": corpus.encode(tokenizer, split.library), "tests": corpus.encode(tokenizer, split.tests)}
        torch.save(streams, encoded)
    return PreTrainedTokenizerFast.from_pretrained(folder), Streams(**torch.load(encoded, weights_only=True))


def train_target(work: Path, minutes: float, streams: Streams) -> LlamaForCausalLM:
    """Train the target, or load it where its budget is already used up."""
    torch.manual_seed(0)
    model = TARGET_SHAPE.build()
    Run(model, Recipe(minutes=minutes), work / "target.pt", streams, cross_entropy, LoopPenalty()).train()
    return model.eval()


def train_draft(work: Path, minutes: float, streams: Streams, target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Distil the drafter from a trained target."""
    torch.manual_seed(1)
    model = DRAFT_SHAPE.build()
    Run(model, Recipe(minutes=minutes, seed=1), work / "draft.pt", streams, distillation_from(target)).train()
    return model.eval()


@click.command()
@click.option("--target-minutes", default=67.0, show_default=True, help="Pretraining time of the target.")
@click.option("--draft-minutes", default=9.0, show_default=True, help="Distillation time of the drafter.")
@click.option("--work", type=click.Path(path_type=Path), default=Path("build/embedded"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=target_path().parent, help="Where the folders go.")
def main(target_minutes: float, draft_minutes: float, work: Path, out: Path) -> None:
    """Train the embedded target and drafter, resuming whatever the work folder holds."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)])
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, streams = prepare(work)
    log.info("%d library and %d test tokens", len(streams.library), len(streams.tests))
    target = train_target(work, target_minutes, streams)
    draft = train_draft(work, draft_minutes, streams, target)
    # Both at the end: a shipped drafter always belongs to the shipped target.
    export(target, tokenizer, out / target_path().name)
    export(draft, tokenizer, out / draft_path().name)


if __name__ == "__main__":
    main()
