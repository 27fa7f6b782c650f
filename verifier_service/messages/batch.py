"""The model runner's input: integers only, the same on every rank, for verifier and drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.verifier_service.messages.columns import Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledBatch:
    """Packed tokens of several sequences for one forward pass.

    Sequence i owns `query_lengths[i]` consecutive tokens; after the step its KV holds `context_lengths[i]` tokens, in
    the blocks of `block_tables[i]`. Prefill chunk, decode and verification differ only in these numbers.
    """

    token_ids: list[int]  # [num_tokens] a negative id is a placeholder: see `placeholder_token`
    positions: list[int]  # [num_tokens] absolute position of each token in its sequence
    slot_mapping: list[int]  # [num_tokens] block_id * block_size + offset: where the token's KV is written
    query_lengths: list[int]  # [num_sequences]
    context_lengths: list[int]  # [num_sequences] includes the query
    block_tables: list[list[int]]  # [num_sequences][blocks that cover context_lengths]
    logits_indices: list[int]  # [num_rows] the packed tokens whose logits are wanted
    # [num_sequences] if a sequence's last tokens form a tree, each one's parent as an index among them, -1 for the
    # token before them. A tree token attends only to its ancestors. Empty: all sequences are chains
    tree_parents: list[list[int]] = field(default_factory=list)
    # [num_sequences] for each token of a tree, the index after the last one that it sees: the masks of a block see each
    # other, any other token none after itself. Of one sequence empty, or all of it empty: there are no masks
    tree_ends: list[list[int]] = field(default_factory=list)
    num_layers: int | None = None  # early exit: final norm and head after so many layers; None: all layers
    move_sources: list[int] = field(default_factory=list)  # slots whose KV is moved before the forward pass, …
    move_targets: list[int] = field(default_factory=list)  # … and their targets; all are read before any is written
    copy_sources: list[int] = field(default_factory=list)  # blocks that are copied after the moves, …
    copy_targets: list[int] = field(default_factory=list)  # … and their targets; all are read before any is written

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def placeholder_token(place: int) -> int:
    """Return the placeholder, a negative id, for token `place` among those that a step in flight chooses."""
    return -1 - place


def placeholder_tokens(places: Int64s) -> list[int]:
    """Return the placeholders for some tokens."""
    placeholders: list[int] = (-1 - places).tolist()
    return placeholders


def slot_of(block_table: Sequence[int], place: int, block_size: int) -> int:
    """Return the KV slot of a sequence's token at index `place`."""
    return block_table[place // block_size] * block_size + place % block_size


def slots_of(block_table: Sequence[int], places: range, block_size: int) -> Sequence[int]:
    """Return the KV slots of consecutive tokens."""
    start = places.start
    if start % block_size + len(places) <= block_size:  # mostly
        first = slot_of(block_table, start, block_size)
        return range(first, first + len(places))
    slots: list[int] = []
    while start < places.stop:
        first = slot_of(block_table, start, block_size)
        count = min(block_size - start % block_size, places.stop - start)
        slots.extend(range(first, first + count))
        start += count
    return slots
