"""How many scratch blocks a target needs to draft for itself: no model code is needed to say so."""

from __future__ import annotations

MAX_DRAFTS_TOGETHER = 32  # of one forward: scratch blocks for more would seldom be used


def scratch_blocks_per_draft(num_nodes: int, block_size: int) -> int:
    """Return how many blocks hold a partly filled block's tokens, the last committed one and the drafted ones."""
    return -(-(block_size + num_nodes) // block_size)
