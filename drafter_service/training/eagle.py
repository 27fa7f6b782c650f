"""Distil an EAGLE-1 head (Li et al. 2024, arXiv 2401.15077) with the target's embeddings.

The authors regress the target's next state. Here the head is unrolled on its own states and learns only the target's
law, which longer drafts need (EAGLE-3).
"""

from __future__ import annotations

import torch

from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.training.head_start import add_nothing, layer_like, pass_last_part_through, share_tables
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.unrolled import UnrolledStudent


def eagle_student(teacher: Teacher, *, num_positions: int, seed: int) -> UnrolledStudent[Teacher]:
    """Create a head that first repeats the target: `fc` passes the state through, and the layer adds nothing."""
    torch.manual_seed(seed)
    head = EagleHead(layer_like(teacher)).to(teacher.device)
    share_tables(head, teacher)
    pass_last_part_through(head.fc)
    add_nothing(head.layers[0])
    return UnrolledStudent(head, teacher, num_positions=num_positions, write=EagleHead.save)
