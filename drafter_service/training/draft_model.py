"""Distil a small causal language model with the target's vocabulary: KL(target || draft) at every token."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.student import num_roots
from outrider.drafter_service.training.teacher import Lesson, SomeTarget, Teacher

log = logging.getLogger(__name__)

HEAD_DIM = 64
MIN_NUM_LAYERS = 2
DEPTH_SHARE = 6  # a sixth of the target's layers
WIDTH_SHARE = 2  # half of its width


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The dimensions of a new draft model, Llama-style with tied embeddings; 0: from the target's."""

    hidden_size: int = 0
    num_layers: int = 0

    def config_for(self, teacher: Teacher) -> LlamaConfig:
        """Return a configuration that shares the target's vocabulary, special tokens and context length."""
        target = teacher.model.config.get_text_config()
        num_layers = self.num_layers or max(MIN_NUM_LAYERS, teacher.num_layers // DEPTH_SHARE)
        hidden_size = self.hidden_size or teacher.hidden_size // WIDTH_SHARE
        head_dim = min(HEAD_DIM, hidden_size // 4)
        if head_dim < 2 or head_dim % 2 or hidden_size % head_dim:
            raise ValueError(f"hidden_size must be a multiple of 8, of {HEAD_DIM} from 256 on, not {hidden_size}")
        num_heads = hidden_size // head_dim
        return LlamaConfig(
            vocab_size=teacher.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=-(-hidden_size * 11 // (4 * 32)) * 32,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2 if num_heads % 2 == 0 else num_heads,
            max_position_embeddings=target.max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
        )


class DraftModelStudent(Generic[SomeTarget]):
    """A whole model as drafter: it reads only the target's tokens."""

    vocab_ids: Tensor | None = None

    def __init__(
        self, model: PreTrainedModel, teacher: SomeTarget, tokenizer: PreTrainedTokenizerBase, *, num_positions: int = 4
    ) -> None:
        if model.config.vocab_size < teacher.vocab_size:
            raise ValueError(f"draft model: {model.config.vocab_size} tokens, the target has {teacher.vocab_size}")
        self.module = model
        self.teacher = teacher
        self.num_positions = num_positions
        self.tokenizer: Any = tokenizer

    @classmethod
    def create(
        cls, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, *, shape: DraftShape, num_positions: int, seed: int
    ) -> DraftModelStudent[Teacher]:
        """Create a model with random weights."""
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(shape.config_for(teacher))
        return DraftModelStudent(model.to(teacher.device), teacher, tokenizer, num_positions=num_positions)

    @classmethod
    def load(
        cls, folder: Path, teacher: SomeTarget, tokenizer: PreTrainedTokenizerBase, *, num_positions: int
    ) -> DraftModelStudent[SomeTarget]:
        """Load an existing model."""
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return DraftModelStudent(model.to(teacher.device), teacher, tokenizer, num_positions=num_positions)

    def loss(self, lesson: Lesson, objective: Objective = Objective.CE) -> Tensor:
        """Return the mean loss of all rows: a model's draft positions differ by the text before them alone."""
        return objective.mean_loss(lesson.law(None).beside(self._logits(lesson), 0))

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Return the model's rows, shifted by a token per position: given the text, positions do not differ."""
        logits = self._logits(lesson)  # [rows, window, vocab_size]
        count = num_roots(lesson, self.num_positions)
        return [logits[:, 1 + position : 1 + position + count] for position in range(self.num_positions)]

    def save(self, folder: Path) -> None:
        model: Any = self.module
        export(model, self.tokenizer, folder)

    def _logits(self, lesson: Lesson) -> Tensor:
        logits: Tensor = self.module(input_ids=lesson.token_ids, use_cache=False).logits
        return logits[..., : self.teacher.vocab_size]


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a transformers folder, replacing the old one atomically by a rename."""
    fresh, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    for stale in (fresh, old):
        shutil.rmtree(stale, ignore_errors=True)
    model.save_pretrained(fresh)
    (fresh / "model.safetensors").chmod(0o644)  # safetensors makes it private, which a wheel must not
    tokenizer.save_pretrained(fresh, save_jinja_files=False)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    log.info("wrote %s", folder)
