"""The paged kernels' metadata of a step: integers, built on the host and moved to the device in one copy.

Launch sizes come from the host's numbers, so nothing is read back from the device.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.verifier_service.gpu.transfers import upload
from outrider.verifier_service.messages.batch import ScheduledBatch

WORD_BITS = 64  # per word of an ancestor mask


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedMetadata:
    """One step's slots, tables, lengths and trees, shared by all layers."""

    num_tokens: int
    num_sequences: int
    max_query_length: int  # chooses tiles, as the next field chooses splits; longer queries are slower, not wrong
    max_context_length: int
    block_size: int
    num_idle: int = 0  # padding sequences of a captured step, which keep no multiprocessor busy
    slot_mapping: torch.Tensor  # int64 [num_tokens]
    query_starts: torch.Tensor  # int32 [num_sequences + 1] into the packed tokens
    context_lengths: torch.Tensor  # int32 [num_sequences]
    block_tables: torch.Tensor  # int32 [num_sequences, width], padded
    tree_sizes: torch.Tensor | None  # int32 [num_sequences] last tokens that form a tree; None: all are chains
    positions: torch.Tensor | None  # int32 [num_tokens]; in a tree, by depth
    # int64 [num_tokens, num_words] bit j: the token sees the tree's j-th token, an ancestor or a mask of its own block
    ancestors: torch.Tensor | None

    @classmethod
    def of(cls, batch: ScheduledBatch, block_size: int, device: torch.device) -> PagedMetadata:
        """Build the metadata of a batch."""
        return cls.over(
            upload(metadata_parts(batch), device),
            max_query_length=max(batch.query_lengths),
            max_context_length=max(batch.context_lengths),
            block_size=block_size,
        )

    @classmethod
    def over(
        cls,
        parts: Sequence[torch.Tensor],
        *,
        max_query_length: int,
        max_context_length: int,
        block_size: int,
        num_idle: int = 0,
    ) -> PagedMetadata:
        """Build the metadata from `metadata_parts` on the device."""
        slots, query_starts, context_lengths, tables, *trees = parts
        tree_sizes, positions, ancestors = trees or (None, None, None)
        return cls(
            num_tokens=len(slots),
            num_sequences=len(context_lengths),
            max_query_length=max_query_length,
            max_context_length=max_context_length,
            block_size=block_size,
            num_idle=num_idle,
            slot_mapping=slots,
            query_starts=query_starts,
            context_lengths=context_lengths,
            block_tables=tables,
            tree_sizes=tree_sizes,
            positions=positions,
            ancestors=ancestors,
        )


def metadata_parts(batch: ScheduledBatch) -> list[np.ndarray]:
    """Return slots, query starts, context lengths and tables; with trees, also tree sizes, positions and ancestors."""
    parts: list[np.ndarray] = [
        np.array(batch.slot_mapping, np.int64),
        np.array([0, *itertools.accumulate(batch.query_lengths)], np.int32),
        np.array(batch.context_lengths, np.int32),
        _padded_tables(batch.block_tables),
    ]
    return parts + _tree_parts(batch) if any(batch.tree_parents) else parts


def _padded_tables(tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Pad tables with block 0: int32 [num_sequences, width]. From arrays: nested lists would take milliseconds."""
    width = max(map(len, tables))
    rows = array("i")
    for table in tables:
        rows.extend(table)
        rows.extend(array("i", [0]) * (width - len(table)))
    return np.frombuffer(rows, np.int32).reshape(len(tables), width)


def _tree_parts(batch: ScheduledBatch) -> list[np.ndarray]:
    """Return tree sizes, positions and ancestors as `PagedMetadata` describes them."""
    num_words = -(-max(map(len, batch.tree_parents)) // WORD_BITS)
    positions = array("i")
    words = bytearray()
    ends = batch.tree_ends or [[]] * len(batch.tree_parents)
    sequences = zip(batch.tree_parents, ends, batch.query_lengths, batch.context_lengths, strict=True)
    for parents, own_ends, length, context in sequences:
        first = context - len(parents)  # index of the tree's first token
        masks: list[int] = []
        depths: list[int] = []
        for index, parent in enumerate(parents):
            masks.append(1 << index if parent < 0 else masks[parent] | 1 << index)
            depths.append(0 if parent < 0 else depths[parent] + 1)
        for index, end in enumerate(own_ends):
            masks[index] |= (1 << end) - (1 << index + 1)
        positions.extend(range(context - length, first))
        positions.extend(first + depth for depth in depths)
        words += bytes(8 * num_words * (length - len(parents)))
        words += b"".join(mask.to_bytes(8 * num_words, "little") for mask in masks)
    return [
        np.array([len(parents) for parents in batch.tree_parents], np.int32),
        np.frombuffer(positions, np.int32),
        np.frombuffer(words, np.int64).reshape(batch.num_tokens, num_words),
    ]


def fill_placeholders(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Replace placeholders (`placeholder_token`) by the tokens that the last step has chosen, on the device.

    token_ids int64 [num_tokens], changed in place; chosen int64 [num_chosen].
    """
    places = (-1 - token_ids).clamp_(min=0)
    token_ids.copy_(torch.where(token_ids < 0, chosen[places], token_ids))
