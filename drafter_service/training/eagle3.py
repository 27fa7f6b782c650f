"""Distil an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840), unrolled on its own states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.drafter_service.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafter_service.training.corpus_windows import TokenStream, frequent_ids
from outrider.drafter_service.training.head_start import (
    copy_if_it_fits,
    layer_like,
    lend_layer,
    lent_tensor,
    pass_last_part_through,
    share_embedding,
)
from outrider.drafter_service.training.teacher import Teacher, default_taps
from outrider.drafter_service.training.unrolled import UnrolledStudent
from outrider.verifier_service.formats.checkpoint import StateDictSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Shape:
    """The options of a new head's shape; its layer has the target's dimensions."""

    draft_vocab_size: int = 32_000  # the most frequent tokens; at most the target's vocabulary
    taps: tuple[int, ...] = ()  # target layers whose input is read; (): default_taps

    def config_for(self, teacher: Teacher) -> Eagle3Config:
        """Return the configuration of a head for a target."""
        return Eagle3Config(
            layer=layer_like(teacher),
            taps=self.taps or default_taps(teacher.num_layers),
            draft_vocab_size=min(self.draft_vocab_size, teacher.vocab_size),
            target_hidden_size=teacher.hidden_size,
        )


def eagle3_student(
    teacher: Teacher, stream: TokenStream, *, shape: Eagle3Shape, num_positions: int, seed: int
) -> UnrolledStudent[Teacher]:
    """Create a head over the stream's most frequent tokens, with the target's weights where they fit."""
    config = shape.config_for(teacher)
    torch.manual_seed(seed)
    ids = frequent_ids(stream, teacher.vocab_size, config.draft_vocab_size)
    head = Eagle3Head(config, target_ids=ids).to(teacher.device)
    share_embedding(head, teacher)
    start_from_target(head, teacher)
    return UnrolledStudent(head, teacher, num_positions=num_positions, write=Eagle3Head.save)


def eagle3_student_from(folder: Path, teacher: Teacher, *, num_positions: int) -> UnrolledStudent[Teacher]:
    """Load an existing head. Raises `ValueError` naming a field that does not fit the target."""
    lender = StateDictSource(dict(teacher.model.state_dict()))
    head = Eagle3Head.from_folder(folder, target=lender, num_target_layers=teacher.num_layers, device=teacher.device)
    share_embedding(head.train().requires_grad_(True), teacher)  # a loaded head has no gradients
    return UnrolledStudent(head, teacher, num_positions=num_positions, write=Eagle3Head.save)


@torch.no_grad()
def start_from_target(head: Eagle3Head, teacher: Teacher) -> None:
    """Copy the target's weights to a new head where they fit.

    `fc` passes the last tapped state through; layer, final norm and output embedding are the target's last. Attention
    reads the state with the last layer's weights, and the embedding with the first layer's.
    """
    pass_last_part_through(head.fc)
    head.lm_head.weight.copy_(teacher.head if head.target_ids is None else teacher.head[head.target_ids])
    copy_if_it_fits(head.norm.weight, lent_tensor(teacher, "norm.weight"))
    first, last = "layers.0.", f"layers.{teacher.num_layers - 1}."
    layer = head.midlayer
    lend_layer(layer, teacher, teacher.num_layers - 1)
    copy_if_it_fits(layer.input_layernorm.weight, lent_tensor(teacher, f"{first}input_layernorm.weight"))
    copy_if_it_fits(layer.hidden_norm.weight, lent_tensor(teacher, f"{last}input_layernorm.weight"))
    for name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        of_embedding, of_state = layer.get_parameter(name).chunk(2, dim=1)  # [heads, hidden_size] each
        copy_if_it_fits(of_embedding, lent_tensor(teacher, f"{first}{name}"))
        copy_if_it_fits(of_state, lent_tensor(teacher, f"{last}{name}"))
