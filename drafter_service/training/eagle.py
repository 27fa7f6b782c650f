"""Distil an EAGLE-1 head (Li et al. 2024, arXiv 2401.15077) under the target's own embeddings.

The authors regress the target's next state; here the head is unrolled on its own states and learns the target's laws
alone, which EAGLE-3's authors found to be what longer drafts need.
"""

from __future__ import annotations

import torch

from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.training.head_start import add_nothing, layer_like, pass_last_part_through, share_tables
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.unrolled import UnrolledPupil


def eagle_pupil(teacher: Teacher, *, num_positions: int, seed: int) -> UnrolledPupil:
    """Begin a new head that repeats the target: its state passes through `fc` and a layer that adds nothing yet."""
    torch.manual_seed(seed)
    head = EagleHead(layer_like(teacher)).to(teacher.device)
    share_tables(head, teacher)
    pass_last_part_through(head.fc)
    add_nothing(head.layers[0])
    return UnrolledPupil(head, teacher, num_positions=num_positions, write=EagleHead.save)
