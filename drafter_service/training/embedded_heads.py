"""Train the embedded target's heads on the standard library, as its draft model was, and measure them as served.

    python -m outrider.drafter_service.training.embedded_heads medusa
    python -m outrider.drafter_service.training.embedded_heads eagle3

The same command with `--resume` goes on with a run that was stopped, or, with a larger budget, with one that ended.
"""

from __future__ import annotations

import logging
from pathlib import Path

import click
import torch
from rich.logging import RichHandler
from transformers import PreTrainedTokenizerFast

from outrider.drafter_service.eagle_drafter import EagleDrafter
from outrider.drafter_service.embedded import corpus, held_out_prompts, target_path
from outrider.drafter_service.embedded.evaluate import DRAFT_LENGTH, NUM_NEW_TOKENS
from outrider.drafter_service.engine import Drafter
from outrider.drafter_service.head_runner import HeadRunner, load_heads
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.drafter_service.medusa_drafter import MedusaDrafter
from outrider.drafter_service.training.corpus_windows import Corpus, TokenStream
from outrider.drafter_service.training.distil import DistilOptions, Method, distil_from
from outrider.drafter_service.training.eagle3 import Eagle3Shape
from outrider.drafter_service.training.medusa import MedusaShape
from outrider.drafter_service.training.served import play_greedily
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.trainer import Budget, StepReport
from outrider.verifier_service.model_config import ModelConfig

log = logging.getLogger(__name__)

DRAFT_VOCAB_SIZE = 1536  # of 2,048: 97.5 % of the library's tokens
LOG_EVERY = 10
DEFAULT_MINUTES = 12.0


def library_corpus(tokenizer: PreTrainedTokenizerFast) -> Corpus:
    """Return the library's sources without its tests, split as for the embedded pair."""
    split = corpus.load_split()
    return Corpus(
        TokenStream(corpus.encode(tokenizer, split.library)), TokenStream(corpus.encode(tokenizer, split.held_out))
    )


def options_for(method: Method, out: Path, *, minutes: float, resume: bool) -> DistilOptions:
    """Return the recipe of the shipped heads."""
    return DistilOptions(
        method=method,
        target=target_path(),
        text=(),
        output=out / method,
        budget=Budget(minutes=minutes),
        device="cpu",
        resume=resume,
        rows=4,
        window=512,
        medusa=MedusaShape(draft_vocab_size=DRAFT_VOCAB_SIZE),
        eagle3=Eagle3Shape(draft_vocab_size=DRAFT_VOCAB_SIZE),
    )


def served_drafter(method: Method, folder: Path) -> Drafter:
    """Load trained heads as a drafter of the embedded target, as a verifier would."""
    rng = torch.Generator().manual_seed(0)
    if method == "medusa":
        heads = MedusaHeads.from_folder(folder)
        return MedusaDrafter(heads, vocab_size=heads.vocab_size, max_model_len=corpus.MAX_LENGTH, rng=rng)
    config = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=256)
    return EagleDrafter(HeadRunner.sized_by(load_heads(method, [folder], config, target=target_path()), config), rng)


@click.command()
@click.argument("method", type=click.Choice(["medusa", "eagle3"]))
@click.option("--minutes", type=float, default=DEFAULT_MINUTES, show_default=True, help="From the first step on.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/heads"), show_default=True)
@click.option("--resume", is_flag=True, help="Go on with the run that was stopped.")
def main(method: Method, minutes: float, out: Path, resume: bool) -> None:
    """Train one kind of head for the embedded target; move the folder into the package to ship it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target_path())
    options = options_for(method, out, minutes=minutes, resume=resume)
    teacher = Teacher.load(target_path(), torch.device("cpu"))
    distilled = distil_from(options, teacher, tokenizer, library_corpus(tokenizer), log_step)
    log.info("%s", distilled.acceptance)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in held_out_prompts()]
    rounds = play_greedily(
        teacher,
        served_drafter(method, options.output),
        prompts,
        num_new_tokens=NUM_NEW_TOKENS,
        draft_length=DRAFT_LENGTH,
    )
    log.info("as served: mean acceptance length %.3f over %d rounds", rounds.mean_acceptance_length, rounds.num_rounds)


def log_step(report: StepReport) -> None:
    if report.step % LOG_EVERY == 0:
        log.info("step %d, %.1f min, loss %.3f", report.step, report.elapsed_s / 60, report.loss)


if __name__ == "__main__":
    main()
