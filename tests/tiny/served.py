"""Samples of served text, with the states of a tiny target; and the checkpoints of what learns from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fakes.backend import build_tokenizer
from outrider.drafter_service.engine.learning_messages import ServedSample
from outrider.drafter_service.service.drafter_spec import DrafterSpec, state_taps
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.drafter_service.training.distil import make_student
from outrider.drafter_service.training.teacher import Teacher
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE
from outrider.verifier_service.model.config import ModelConfig
from tiny.training import make_corpus, options_for

LAST_STATE_ONLY = (Method.MEDUSA, Method.MLP_SPECULATOR)
NUM_WORDS = 40  # tokens that drifted text has
LENGTH, NUM_PROMPT = 30, 6


def sample(request_id: str = "r", token_ids: Sequence[int] = (1, 2, 3, 4), **fields: Any) -> ServedSample:
    """A sample of few tokens, the first a prompt's."""
    return ServedSample(**{"request_id": request_id, "token_ids": tuple(token_ids), "num_prompt_tokens": 1} | fields)


def drifted(rng: random.Random) -> list[int]:
    """Text that follows a rule which nothing was trained on: each token gives the next one."""
    tokens = [rng.randrange(NUM_WORDS)]
    while len(tokens) < LENGTH:
        tokens.append((tokens[-1] * 7 + 11) % NUM_WORDS)
    return tokens


def states_of(teacher: Teacher, token_ids: Sequence[int], positions: Sequence[int]) -> bytes:
    """The states of some of a text's tokens, as a sample has them."""
    states = teacher.lesson(torch.tensor([list(token_ids)])).states[0, list(positions)]
    return states.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def served_samples(
    target: Path, taps: tuple[int, ...], *, count: int, seed: int = 0, asks_alone: bool = False
) -> list[ServedSample]:
    """Drifted text as a drafter with these taps would keep it: `asks_alone` has the states of every second token."""
    teacher = Teacher.load(target, torch.device("cpu"), dtype=torch.float32).tapping(taps)
    rng, samples = random.Random(seed), []
    for index in range(count):
        token_ids = drifted(rng)
        positions = range(NUM_PROMPT - 1, LENGTH - 1, 2) if asks_alone else range(LENGTH - 1)
        samples.append(
            ServedSample(
                request_id=f"{seed}-{index}",
                token_ids=tuple(token_ids),
                num_prompt_tokens=NUM_PROMPT,
                state_width=len(taps) * teacher.hidden_size,
                state_positions=tuple(positions) if taps else (),
                states=states_of(teacher, token_ids, positions) if taps else b"",
            )
        )
    return samples


def rows_of(laws: torch.Tensor, num_top: int) -> tuple[bytes, bytes]:
    """The likeliest tokens of laws [num_rows, vocab_size] as a sample has them: ids and weights."""
    probs, ids = laws.topk(num_top)
    weights = (probs / probs.sum(-1, keepdim=True) * DRAFT_PROB_SCALE).round()
    return ids.numpy().astype(np.int32).tobytes(), weights.numpy().astype(np.int32).tobytes()


def write_first(root: Path, target: Path, method: Method) -> Path:
    """Write the checkpoint that a pool of a method starts with, somewhat off its beginning."""
    folder = root / f"first {method}"
    if not folder.exists():
        teacher = Teacher.load(target, torch.device("cpu"), dtype=torch.float32)
        student = make_student(
            options_for(method.value.replace("_", "-"), root / "drafter"), teacher, build_tokenizer(), make_corpus()
        )
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in student.module.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
        student.save(folder)
    return folder


def spec_of(target: Path, folder: Path | None, method: Method) -> DrafterSpec:
    """The spec of a pool's drafter."""
    bounds: dict[str, Any] = {"device": "cpu", "num_kv_blocks": 64, "block_size": 4, "max_model_len": 64}
    return DrafterSpec(
        model=None if folder is None else ModelConfig(path=str(folder), check_logits=False, **bounds),
        target=ModelConfig(path=str(target), check_logits=False, **bounds),
        speculative=SpeculativeConfig(method=method, model=None if folder is None else str(folder)),
    )


def samples_for(spec: DrafterSpec, *, count: int, seed: int = 0) -> list[ServedSample]:
    """Drifted text as a spec's drafter would keep it."""
    asks_alone = spec.speculative.method in LAST_STATE_ONLY
    return served_samples(Path(spec.target.path), state_taps(spec), count=count, seed=seed, asks_alone=asks_alone)
