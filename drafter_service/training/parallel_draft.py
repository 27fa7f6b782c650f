"""Adapt a model to predict several tokens in one pass with mask tokens: a draft model, or the target itself.

A draft model: PARD (An et al. 2025, arXiv 2504.18583). The masks of some roots follow the text; a mask sees the text up
to its root and the root's earlier masks:

    text     0  1 .. s+1                      causal; the row of s+1 is the first guess
    masks    of root s: at s+2 .. s+K         the rows of K - 1 masks are the other guesses
    sees     0 .. s+1, the root's own masks so far

One forward computes the text once and all masks. The mask is an extra token after the vocabulary.

The target: TiDAR (Liu et al. 2025, arXiv 2511.08923). The masks of a root, K of them, see each other. The first has the
place of the token that is drawn after s+1, and as that of any token its row is for the next place; so they guess behind
a token that they do not know (`verifier_service/scheduling/masks.py` says why):

    masks    of root s: at s+2 .. s+1+K
    row      of s+1: token s+2                the drawn one
             of mask d: token s+2+d           the draft

What comes out is a model of its own: its next tokens have the untaught target's law as nearly as it could learn, and
what it serves is its own law. The mask is a token that the text hardly has, so that the vocabulary stays as it is.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from outrider.drafter_service.models.parallel_drafter import MASK_KEYS, parse_mask_token_id
from outrider.drafter_service.target.tidar_drafter import BLOCK_KEY
from outrider.drafter_service.training.corpus_windows import TokenStream
from outrider.drafter_service.training.draft_model import DraftModelStudent, export
from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.student import num_roots, span_loss
from outrider.drafter_service.training.teacher import Lesson, Teacher

TIDAR_MASK_KEY = MASK_KEYS[0]
MASK_KEY = "pard_token"  # as in the authors' checkpoints
ROW_MULTIPLE = 64  # embedding rows that the mask token adds: tables of odd sizes are slow, and cannot be sharded


class ParallelStudent:
    """A draft model that learns to predict `num_positions` tokens in one pass."""

    vocab_ids: Tensor | None = None

    def __init__(self, draft: DraftModelStudent[Teacher]) -> None:
        """Adapt a draft model; it gets a mask token unless its config has one."""
        model: Any = draft.module
        model.set_attn_implementation("sdpa")  # it supports arbitrary attention masks
        if all(getattr(model.config, key, None) is None for key in MASK_KEYS):
            mask_token_id = model.config.vocab_size
            model.resize_token_embeddings(mask_token_id + 1, pad_to_multiple_of=ROW_MULTIPLE, mean_resizing=False)
            setattr(model.config, MASK_KEY, mask_token_id)
        self._mask_token_id = parse_mask_token_id(model.config.to_dict(), model.config.vocab_size)
        self._draft = draft
        self.module = model
        self.teacher = draft.teacher
        self.num_positions = draft.num_positions

    def loss(self, lesson: Lesson, objective: Objective = Objective.CE) -> Tensor:
        return span_loss(self._guess, lesson, self.num_positions, objective)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        return self._guess(lesson, range(num_roots(lesson, self.num_positions)))

    def _guess(self, lesson: Lesson, span: range) -> list[Tensor]:
        """Predict from consecutive roots: [rows, num_roots, vocab_size] per position."""
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


class TidarStudent:
    """A copy of the target that learns to guess `num_positions` tokens behind its own next one."""

    vocab_ids: Tensor | None = None

    def __init__(
        self, model: Any, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, stream: TokenStream, num_positions: int
    ) -> None:
        """`model` gets a mask token unless its config has one: the one that the text has least."""
        model.set_attn_implementation("sdpa")  # it supports arbitrary attention masks
        if getattr(model.config, TIDAR_MASK_KEY, None) is None:
            setattr(model.config, TIDAR_MASK_KEY, int(stream.counts(teacher.vocab_size).argmin()))
        setattr(model.config, BLOCK_KEY, num_positions)
        self._mask_token_id: int = getattr(model.config, TIDAR_MASK_KEY)
        self._tokenizer: Any = tokenizer
        self.module, self.teacher, self.num_positions = model, teacher, num_positions

    @classmethod
    def create(
        cls,
        teacher: Teacher,
        tokenizer: PreTrainedTokenizerBase,
        stream: TokenStream,
        *,
        num_positions: int,
        seed: int = 0,
        init_from: Path | None = None,
    ) -> TidarStudent:
        """Begin with the target, or with one that was taught before; `seed` is that of the roots that are drawn."""
        torch.manual_seed(seed)
        model: Any
        if init_from is None:
            model = copy.deepcopy(teacher.model).float().requires_grad_()
        else:
            model = AutoModelForCausalLM.from_pretrained(init_from, dtype=torch.float32)
        return cls(model.to(teacher.device), teacher, tokenizer, stream, num_positions)

    def loss(self, lesson: Lesson, objective: Objective = Objective.CE) -> Tensor:
        """Return the loss of the next token and of those guessed, beside the target's law."""
        return span_loss(self._guess, lesson, self.num_positions + 1, objective)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Return the masks' rows; the draft after token s + 1 was guessed when s was the last one that was known."""
        return self._guess(lesson, range(-1, num_roots(lesson, self.num_positions) - 1))[1:]

    def _guess(self, lesson: Lesson, span: range) -> list[Tensor]:
        """Predict from consecutive roots: [rows, num_roots, vocab_size] of the next token and of each mask."""
        text = lesson.token_ids[:, : span.stop + 1]
        masks = text.new_full((len(text), self.num_positions * len(span)), self._mask_token_id)
        roots, depths = canvas_of(span, self.num_positions + 1, text.device)
        logits = self.module(
            input_ids=torch.cat([text, masks], dim=1),
            position_ids=(roots + depths + 1)[None],
            attention_mask=visible_blocks(roots, depths)[None, None].expand(len(text), -1, -1, -1),
            use_cache=False,
        ).logits[:, span.start + 1 :]
        return list(logits.split(len(span), dim=1))

    def save(self, folder: Path) -> None:
        export(self.module, self._tokenizer, folder)


def canvas_of(span: range, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each token's root and depth, int64 [num_tokens] each: text up to the last root's, then masks by depth.

    Text token s+1 has root s and depth 0; token 0 has root -1.
    """
    text = torch.arange(-1, span.stop, device=device)
    masks = torch.arange(span.start, span.stop, device=device).repeat(num_positions - 1)
    depths = torch.arange(1, num_positions, device=device).repeat_interleave(len(span))
    return torch.cat([text, masks]), torch.cat([torch.zeros_like(text), depths])


def visible(roots: Tensor, depths: Tensor) -> Tensor:
    """Return the attention mask, bool [num_tokens, num_tokens]: text up to the root, the root's masks up to itself."""
    is_text = (depths == 0)[None] & (roots[None] <= roots[:, None])
    is_own = (roots[None] == roots[:, None]) & (depths[None] <= depths[:, None])
    return is_text | is_own


def visible_blocks(roots: Tensor, depths: Tensor) -> Tensor:
    """Return the attention mask, bool [num_tokens, num_tokens]: text up to the root, and all of the root's masks."""
    is_text = (depths == 0)[None] & (roots[None] <= roots[:, None])
    is_own = (roots[None] == roots[:, None]) & (depths[None] > 0) & (depths[:, None] > 0)
    return is_text | is_own
