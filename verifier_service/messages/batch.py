"""The scheduler's order to the model runner: integers only, the same for verifier and drafter, for every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """Packed tokens of several sequences for one forward pass.

    Sequence i owns `query_lengths[i]` consecutive tokens; after the step its KV holds `context_lengths[i]` tokens, in
    the blocks of `block_tables[i]`. Prefill chunk, decode and verification differ only in these numbers.
    """

    token_ids: list[int]  # [num_tokens] a negative one stands open: see `open_token`
    positions: list[int]  # [num_tokens] absolute position of each token in its sequence
    slot_mapping: list[int]  # [num_tokens] block_id * block_size + offset: where the token's KV is written
    query_lengths: list[int]  # [num_sequences]
    context_lengths: list[int]  # [num_sequences] includes the query
    block_tables: list[list[int]]  # [num_sequences][blocks that cover context_lengths]
    logits_indices: list[int]  # [num_rows] indices into the packed tokens whose logits are wanted
    # [num_sequences] where a sequence's last tokens form a tree: for each of them the index of its parent among them,
    # or -1 for the token before them; it sees its ancestors alone. Empty: all chains
    tree_parents: list[list[int]] = field(default_factory=list)
    num_layers: int | None = None  # leave after so many layers, as the model's last ones would; None: all
    move_sources: list[int] = field(default_factory=list)  # slots whose KV is moved before anything else of the step …
    move_targets: list[int] = field(default_factory=list)  # … and, one for each, where to: all are read, then written
    copy_sources: list[int] = field(default_factory=list)  # blocks to copy after that …
    copy_targets: list[int] = field(default_factory=list)  # … and, one for each, where to: all are read, then written

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def open_token(place: int) -> int:
    """Return what stands for a token that its step has not chosen yet: it will be the number at `place` there."""
    return -1 - place


def slot_of(block_table: Sequence[int], place: int, block_size: int) -> int:
    """Return where the KV of a sequence's token at `place` lies."""
    return block_table[place // block_size] * block_size + place % block_size


def slots_of(block_table: Sequence[int], places: range, block_size: int) -> list[int]:
    """Return the slots of consecutive places, one range per block."""
    slots: list[int] = []
    start = places.start
    while start < places.stop:
        first = slot_of(block_table, start, block_size)
        count = min(block_size - start % block_size, places.stop - start)
        slots.extend(range(first, first + count))
        start += count
    return slots
