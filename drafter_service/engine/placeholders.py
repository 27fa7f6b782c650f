"""The batch of chains' placeholders: tokens that were chosen on the device and that the host has not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from outrider.verifier_service.messages.batch import ScheduledBatch, slot_of


class Placeholder(NamedTuple):
    """The next token of a chain."""

    token_id: int  # the placeholder for it
    position: int
    block_table: list[int]
    place: int  # of its KV in the table


def pack_placeholders(tokens: Sequence[Placeholder], block_size: int) -> ScheduledBatch:
    """Lay out one token of each chain, whose logits are wanted."""
    return ScheduledBatch(
        token_ids=[token.token_id for token in tokens],
        positions=[token.position for token in tokens],
        slot_mapping=[slot_of(token.block_table, token.place, block_size) for token in tokens],
        query_lengths=[1] * len(tokens),
        context_lengths=[token.place + 1 for token in tokens],
        block_tables=[token.block_table[: token.place // block_size + 1] for token in tokens],
        logits_indices=list(range(len(tokens))),
    )
