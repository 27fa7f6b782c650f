"""Distil an MTP layer (DeepSeek-V3, arXiv 2412.19437) for a target that was trained without one.

It is written to a separate checkpoint, in the layout of the `speculators` library.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from outrider.drafter_service.heads.head_files import write_head
from outrider.drafter_service.heads.head_layer import unborrowed
from outrider.drafter_service.heads.mtp import SPECULATORS, MtpHead
from outrider.drafter_service.training.head_start import (
    copy_if_it_fits,
    layer_like,
    lend_layer,
    lent_tensor,
    pass_last_part_through,
    share_tables,
)
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.unrolled import UnrolledStudent

PREFIX = "mtp_layers.0."


def mtp_student(teacher: Teacher, *, num_positions: int, seed: int) -> UnrolledStudent[Teacher]:
    """Create a layer: copies of the target's last layer and final norm read the target's normed state."""
    torch.manual_seed(seed)
    head = MtpHead(layer_like(teacher)).to(teacher.device)
    share_tables(head, teacher)
    pass_last_part_through(head.eh_proj)
    lend_layer(head.layer, teacher, teacher.num_layers - 1)
    copy_if_it_fits(head.norm.weight, lent_tensor(teacher, "norm.weight"))
    return UnrolledStudent(head, teacher, num_positions=num_positions, write=write_mtp)


def write_mtp(head: MtpHead, folder: Path) -> None:
    """Write a checkpoint, without the target's tensors."""
    layer = {**head.description.to_diff_dict(), "model_type": head.description.model_type}
    config = {"speculators_model_type": "mtp", "transformer_layer_config": layer}
    write_head(folder, config, {PREFIX + _stored_name(name): tensor for name, tensor in unborrowed(head).items()})


def _stored_name(name: str) -> str:
    for pattern, theirs in SPECULATORS:
        if re.search(pattern, name):
            return re.sub(pattern, theirs, name)
    return name
