"""Adapt a draft model to guess ahead over mask tokens: PARD (An et al. 2025, arXiv 2504.18583).

Behind the text the masks of some roots are laid, which see the text up to the root and the masks before them:

    text     0  1 .. s+1                      causal, as ever; the row of s+1 is the first guess
    masks    of root s: at s+2 .. s+K         the rows of K - 1 masks are the other guesses
    sees     0 .. s+1, the root's own masks so far

One forward computes the text once and all of these masks. The mask is a token of its own, behind the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.drafter_service.models.parallel_drafter import MASK_KEYS, parse_mask_token_id
from outrider.drafter_service.training.draft_model import DraftModelPupil
from outrider.drafter_service.training.export import export
from outrider.drafter_service.training.pupil import num_roots, span_loss
from outrider.drafter_service.training.teacher import Lesson

MASK_KEY = "pard_token"  # as in the authors' checkpoints
ROW_MULTIPLE = 64  # embedding rows that a mask token adds: tables of odd sizes are slow, and cannot be sharded


class ParallelPupil:
    """A draft model that also learns to guess `num_positions` tokens in one pass."""

    vocab_ids: Tensor | None = None

    def __init__(self, draft: DraftModelPupil) -> None:
        """Go on with a draft model, which gets a mask token unless its config names one."""
        model: Any = draft.module
        model.set_attn_implementation("sdpa")  # which takes masks of any shape
        if all(getattr(model.config, key, None) is None for key in MASK_KEYS):
            mask_token_id = model.config.vocab_size
            model.resize_token_embeddings(mask_token_id + 1, pad_to_multiple_of=ROW_MULTIPLE, mean_resizing=False)
            setattr(model.config, MASK_KEY, mask_token_id)
        self._mask_token_id = parse_mask_token_id(model.config.to_dict(), model.config.vocab_size)
        self._draft = draft
        self.module = model
        self.teacher = draft.teacher
        self.num_positions = draft.num_positions

    def loss(self, lesson: Lesson) -> Tensor:
        return span_loss(self._guess, lesson, self.num_positions)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        return self._guess(lesson, range(num_roots(lesson, self.num_positions)))

    def _guess(self, lesson: Lesson, span: range) -> list[Tensor]:
        """Guess from a run of roots: [rows, num_roots, vocab_size] per position."""
        text = lesson.token_ids[:, : span.stop + 1]
        masks = text.new_full((len(text), (self.num_positions - 1) * len(span)), self._mask_token_id)
        roots, depths = canvas_of(span, self.num_positions, text.device)
        logits = self.module(
            input_ids=torch.cat([text, masks], dim=1),
            position_ids=(roots + depths + 1)[None],
            attention_mask=visible(roots, depths)[None, None].expand(len(text), -1, -1, -1),
            use_cache=False,
        ).logits[:, span.start + 1 :, : self.teacher.vocab_size]
        return list(logits.split(len(span), dim=1))

    def save(self, folder: Path) -> None:
        export(self.module, self._draft.tokenizer, folder)


def canvas_of(span: range, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return root and depth of each token: the text up to the last root's, then the roots' masks, depth by depth.

    A text token s+1 is the one of root s at depth 0, token 0 that of no root (-1): int64 [num_tokens] each.
    """
    text = torch.arange(-1, span.stop, device=device)
    masks = torch.arange(span.start, span.stop, device=device).repeat(num_positions - 1)
    depths = torch.arange(1, num_positions, device=device).repeat_interleave(len(span))
    return torch.cat([text, masks]), torch.cat([torch.zeros_like(text), depths])


def visible(roots: Tensor, depths: Tensor) -> Tensor:
    """Tell what each token sees, bool [num_tokens, num_tokens]: text up to its root, its root's masks up to itself."""
    is_text = (depths == 0)[None] & (roots[None] <= roots[:, None])
    is_own = (roots[None] == roots[:, None]) & (depths[None] <= depths[:, None])
    return is_text | is_own
