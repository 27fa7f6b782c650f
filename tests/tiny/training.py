"""A tiny target with a tokenizer and text to distil from."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from fakes.backend import build_tokenizer
from outrider.drafter_service.training.corpus_windows import Corpus, TokenStream
from outrider.drafter_service.training.dflash import DFlashShape
from outrider.drafter_service.training.distil import DistilOptions, make_student
from outrider.drafter_service.training.draft_model import DraftShape
from outrider.drafter_service.training.eagle3 import Eagle3Shape
from outrider.drafter_service.training.student import TaughtStudent
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.trainer import Budget
from tiny.models import make_checkpoint, make_model

NUM_LAYERS = 4
INITIALIZER_RANGE = 0.15  # peaked laws, that steps of seconds can teach something of
VOCAB_SIZE = 320  # of the tokenizer
DRAFT_VOCAB_SIZE = 200
WORDS = ("the quick brown fox", "jumps over", "the lazy dog", "and on it goes", "1, 2, 3")


def make_teacher(model_type: str = "llama") -> Teacher:
    """Build a small random target."""
    return Teacher(
        make_model(model_type, num_hidden_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE, initializer_range=INITIALIZER_RANGE)
    )


def write_target(folder: Path) -> PreTrainedTokenizerFast:
    """Write the checkpoint of such a target with its tokenizer."""
    make_checkpoint(folder, num_hidden_layers=NUM_LAYERS, vocab_size=VOCAB_SIZE, initializer_range=INITIALIZER_RANGE)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_text(folder: Path, num_files: int = 12) -> Path:
    """Write some files of text."""
    generator = random.Random(0)
    folder.mkdir()
    for number in range(num_files):
        (folder / f"{number}.txt").write_text(". ".join(generator.choices(WORDS, k=20)))
    return folder


def make_corpus(num_tokens: int = 2000) -> Corpus:
    """Draw tokens, the lower ids oftener; none of the highest occur."""
    generator = torch.Generator().manual_seed(3)
    ids = (torch.rand(2, num_tokens, generator=generator).square() * (VOCAB_SIZE - 20)).to(torch.int32)
    return Corpus(TokenStream(ids[0]), TokenStream(ids[1]))


def options_for(method: str, output: Path, *, num_steps: int = 6, resume: bool = False) -> DistilOptions:
    """Return options of a run of seconds."""
    return DistilOptions(
        method=method,
        target=output.parent / "target",
        text=(),
        output=output,
        budget=Budget(num_steps=num_steps),
        device="cpu",
        resume=resume,
        rows=4,
        window=16,
        num_positions=3,
        eval_windows=4,
        eval_prompts=2,
        draft=DraftShape(hidden_size=32, num_layers=1),
        eagle3=Eagle3Shape(draft_vocab_size=DRAFT_VOCAB_SIZE),
        dflash=DFlashShape(num_layers=1),
    )


def make_tiny_student(method: str, output: Path = Path("unused")) -> TaughtStudent:
    """Begin a drafter of a tiny target."""
    return make_student(options_for(method, output), make_teacher(), build_tokenizer(), make_corpus())
