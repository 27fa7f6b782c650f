"""Distil a DFlash block drafter (arXiv 2602.06036) with the target's embeddings.

Every root of a window has a block: the last committed token, then a mask per guess. It attends to the keys of the
target's states up to the root, which are computed once for all roots, and bidirectionally to itself.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config

from outrider.drafter_service.heads.dflash import DFlashConfig, DFlashHead
from outrider.drafter_service.heads.head_files import write_head
from outrider.drafter_service.heads.head_layer import unborrowed
from outrider.drafter_service.training.corpus_windows import TokenStream
from outrider.drafter_service.training.head_start import (
    copy_if_it_fits,
    layer_like,
    lend_layer,
    lent_tensor,
    pass_last_part_through,
    share_tables,
)
from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.student import SAVED_DTYPE, num_roots, span_loss
from outrider.drafter_service.training.teacher import Lesson, Teacher, default_taps


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashShape:
    """The options of a new drafter's shape; its layers have the target's dimensions."""

    num_layers: int = 2
    taps: tuple[int, ...] = ()  # target layers whose input is read; (): default_taps

    def config_for(self, teacher: Teacher, *, mask_token_id: int, num_guesses: int) -> DFlashConfig:
        """Return the configuration of a drafter for a target."""
        layer = layer_like(teacher).to_dict()
        for name in ("model_type", "architectures", "num_hidden_layers"):
            layer.pop(name, None)
        return DFlashConfig(
            layer=Qwen3Config(**layer, num_hidden_layers=self.num_layers),
            taps=self.taps or default_taps(teacher.num_layers),
            draft_vocab_size=teacher.vocab_size,
            target_hidden_size=teacher.hidden_size,
            mask_token_id=mask_token_id,
            block_size=num_guesses + 1,
        )


class DFlashStudent:
    """A block drafter with a block at each of its roots."""

    vocab_ids: Tensor | None = None

    def __init__(self, head: DFlashHead, teacher: Teacher) -> None:
        self.module = head
        self.teacher = teacher.tapping(head.taps)
        self.num_positions = head.config.num_guesses

    @classmethod
    def create(
        cls, teacher: Teacher, stream: TokenStream, *, shape: DFlashShape, num_guesses: int, seed: int
    ) -> DFlashStudent:
        """Create a new drafter; its mask is the stream's rarest token."""
        mask_token_id = int(stream.counts(teacher.vocab_size).argmin())
        torch.manual_seed(seed)
        head = DFlashHead(shape.config_for(teacher, mask_token_id=mask_token_id, num_guesses=num_guesses))
        head.to(teacher.device)
        share_tables(head, teacher)
        pass_last_part_through(head.fc)
        for index, layer in enumerate(head.layers):
            lend_layer(layer, teacher, teacher.num_layers - len(head.layers) + index)
        copy_if_it_fits(head.norm.weight, lent_tensor(teacher, "norm.weight"))
        return cls(head, teacher)

    def loss(self, lesson: Lesson, objective: Objective = Objective.CE) -> Tensor:
        return span_loss(self._guess, lesson, self.num_positions, objective)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        return self._guess(lesson, range(num_roots(lesson, self.num_positions)))

    def _guess(self, lesson: Lesson, span: range) -> list[Tensor]:
        """Predict the masks of consecutive roots' blocks: [rows, num_roots, vocab_size] per position."""
        config, num_rows, device = self.module.config, len(lesson.token_ids), lesson.token_ids.device
        blocks = lesson.token_ids.new_full((num_rows, len(span), config.block_size), config.mask_token_id)
        blocks[..., 0] = lesson.token_ids[:, 1 + span.start : 1 + span.stop]
        positions = torch.arange(span.stop, device=device)
        features = self.module.combine(lesson.states[:, : span.stop]).flatten(0, 1)  # [rows * span.stop, hidden_size]
        context = self.module.context_kv(features, positions.repeat(num_rows))
        first = 1 + positions[span.start :, None]  # of each block: [num_roots, 1]
        output = self.module(
            blocks.flatten(0, 1),
            (first + torch.arange(config.block_size, device=device)).repeat(num_rows, 1),
            [BlockAttention(*(part.unflatten(0, (num_rows, -1)) for part in layer)) for layer in context],
        )  # [rows * num_roots, block_size, hidden_size]
        logits = self.module.logits(output[:, 1:]).unflatten(0, (num_rows, len(span)))
        return list(logits.unbind(2))

    def save(self, folder: Path) -> None:
        write_dflash(copy.deepcopy(self.module).to(SAVED_DTYPE), folder)


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Attention of the last roots' blocks: to the context up to the root, and bidirectionally to the block."""

    key: Tensor  # [rows, num_tokens, num_kv_heads, head_dim] of the context, up to the last root
    value: Tensor

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [rows * num_roots, num_heads, block_size, head_dim] -> heads second to last."""
        num_rows, num_tokens, num_kv_heads, _ = self.key.shape
        # [rows, num_roots, num_kv_heads, queries of a key, block_size, head_dim]
        query = query.unflatten(1, (num_kv_heads, -1)).unflatten(0, (num_rows, -1)) * query.shape[-1] ** -0.5
        key, value = key.unflatten(0, (num_rows, -1)), value.unflatten(0, (num_rows, -1))
        context = torch.arange(num_tokens, device=query.device)
        is_past = context <= context[-query.shape[1] :, None]  # [num_roots, num_tokens]
        shared = torch.einsum("rnkgbd,rtkd->rnkgbt", query, self.key)
        shared = shared.masked_fill(~is_past[:, None, None, None], float("-inf"))
        own = torch.einsum("rnkgbd,rnktd->rnkgbt", query, key)
        weights = torch.cat([shared, own], dim=-1).float().softmax(-1).to(value.dtype)
        output = torch.einsum("rnkgbt,rtkd->rnkgbd", weights[..., :num_tokens], self.value.to(value.dtype))
        output = output + torch.einsum("rnkgbt,rnktd->rnkgbd", weights[..., num_tokens:], value)
        return output.flatten(0, 1).flatten(1, 2).transpose(1, 2)


def write_dflash(head: DFlashHead, folder: Path) -> None:
    """Write a checkpoint in the layout of the `speculators` library, without the target's tensors."""
    config = head.config
    described = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**config.layer.to_diff_dict(), "model_type": config.layer.model_type},
        "aux_hidden_state_layer_ids": list(config.taps),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
    }
    write_head(folder, described, unborrowed(head))
