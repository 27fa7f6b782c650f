"""Train drafters of the embedded target on the standard library, as its draft model was, and measure them as served.

    python -m outrider.lab.embedded.heads medusa
    python -m outrider.lab.embedded.heads eagle3

Those two are shipped; every other METHOD of `outrider train-drafter` can be trained in the same way.
The same command with `--resume` goes on with a run that was stopped, or, with a larger budget, with one that ended.
"""

from __future__ import annotations

import logging
from pathlib import Path

import click
import torch
from rich.logging import RichHandler
from transformers import PreTrainedTokenizerFast

from outrider.drafter_service.embedded import draft_path, held_out_prompts, target_path
from outrider.drafter_service.service.methods import TRAINED
from outrider.drafter_service.training.corpus_windows import Corpus, TokenStream
from outrider.drafter_service.training.distil import DistilOptions, distil_from
from outrider.drafter_service.training.eagle3 import Eagle3Shape
from outrider.drafter_service.training.medusa import MedusaShape
from outrider.drafter_service.training.served import continue_greedily, play_greedily, serve_greedily, served_drafter
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.trainer import Budget, StepReport
from outrider.lab.embedded import corpus

log = logging.getLogger(__name__)

DRAFT_VOCAB_SIZE = 1536  # of 2,048: 97.5 % of the library's tokens
LOG_EVERY = 10
NUM_NEW_TOKENS, DRAFT_LENGTH = 128, 4  # as it is served
DEFAULT_MINUTES = 12.0
ROWS, WINDOW = 4, 512  # of a training step
# for those whose every root has masks of its own, which see all the text before it: the same tokens in shorter windows
MASKED: tuple[str, ...] = ("parallel-draft", "dflash", "tidar")
MASKED_ROWS, MASKED_WINDOW = 8, 256


def library_corpus(tokenizer: PreTrainedTokenizerFast) -> Corpus:
    """Return the library's sources without its tests, split as for the embedded pair."""
    split = corpus.load_split()
    return Corpus(
        TokenStream(corpus.encode(tokenizer, split.library)), TokenStream(corpus.encode(tokenizer, split.held_out))
    )


def options_for(method: str, out: Path, *, minutes: float, resume: bool) -> DistilOptions:
    """Return the recipe of the shipped heads, which does for the others."""
    return DistilOptions(
        method=method,
        target=target_path(),
        text=(),
        output=out / method,
        budget=Budget(minutes=minutes),
        device="cpu",
        resume=resume,
        rows=MASKED_ROWS if method in MASKED else ROWS,
        window=MASKED_WINDOW if method in MASKED else WINDOW,
        init_from=draft_path() if method == "parallel-draft" else None,
        medusa=MedusaShape(draft_vocab_size=DRAFT_VOCAB_SIZE),
        eagle3=Eagle3Shape(draft_vocab_size=DRAFT_VOCAB_SIZE),
    )


@click.command()
@click.argument("method", type=click.Choice(list(TRAINED)))
@click.option("--minutes", type=float, default=DEFAULT_MINUTES, show_default=True, help="From the first step on.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/heads"), show_default=True)
@click.option("--resume", is_flag=True, help="Go on with the run that was stopped.")
def main(method: str, minutes: float, out: Path, resume: bool) -> None:
    """Train one kind of drafter for the embedded target; move the folder into the package to ship it."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target_path())
    options = options_for(method, out, minutes=minutes, resume=resume)
    teacher = Teacher.load(target_path(), torch.device("cpu"))
    distilled = distil_from(options, teacher, tokenizer, library_corpus(tokenizer), log_step)
    log.info("%s", distilled.acceptance)
    prompts = [tokenizer(prompt)["input_ids"] for prompt in held_out_prompts()]
    if method == "tidar":
        rounds = serve_greedily(options.output, prompts, num_new_tokens=NUM_NEW_TOKENS, draft_length=DRAFT_LENGTH)
    else:
        continuations = continue_greedily(teacher, prompts, num_new_tokens=NUM_NEW_TOKENS)
        drafter = served_drafter(method, options.output, target_path())
        rounds = play_greedily(teacher, drafter, continuations, draft_length=DRAFT_LENGTH)
    log.info("as served: mean acceptance length %.3f over %d rounds", rounds.mean_acceptance_length, rounds.num_rounds)


def log_step(report: StepReport) -> None:
    if report.step % LOG_EVERY == 0:
        log.info("step %d, %.1f min, loss %.3f", report.step, report.elapsed_s / 60, report.loss)


if __name__ == "__main__":
    main()
