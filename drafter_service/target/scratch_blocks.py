"""How many KV blocks of its own a target that drafts for itself needs; knowing it needs no model code."""

from __future__ import annotations

MAX_DRAFTS_TOGETHER = 32  # that a target drafts for itself in one go: scratch blocks for more would lie idle


def scratch_blocks_per_draft(num_nodes: int, block_size: int) -> int:
    """Return how many blocks hold a partly filled block's tokens, the last committed one and the drafted ones."""
    return -(-(block_size + num_nodes) // block_size)
