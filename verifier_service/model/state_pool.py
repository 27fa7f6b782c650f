"""Keep the target's hidden states for drafters that read them, slot by slot beside the KV cache.

A tapped state is addressed by its token's KV slot, so it needs no bookkeeping of its own: it comes back with a prefix
hit, follows forks and the accepted path of a tree, and is gone when its block is given to somebody else. Whatever the
KV cache still knows of a prefix, a new, resynced or replaced drafter can be told; nothing is ever computed again for
it. The states lie in the host's memory: 3 taps of an 8B model in half precision take 24 KiB a token, its KV 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.batch import slots_of
from outrider.verifier_service.messages.draft import FINAL_TAP, States
from outrider.verifier_service.messages.request import Request

MAX_ON_THEIR_WAY = 2  # the copy of the step before the last is there by the time the next one is made
MAX_MESSAGE_BYTES = 4 << 20  # of states in one message: a long prompt must not hold up the drafts of others


def require_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raise `ValueError` for a layer that the model does not have."""
    for tap in taps:
        if tap != FINAL_TAP and not 0 <= tap < num_layers:
            raise ValueError(f"state_taps: layer {tap}, the model has {num_layers}")


def resolve_state_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which states are kept and sent; auto: the model's own."""
    dtype = model_dtype if name == "auto" else getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class StatePool:
    """Tapped states of all slots: [num_blocks * block_size, width]."""

    def __init__(self, *, num_blocks: int, block_size: int, width: int, dtype: torch.dtype) -> None:
        self.block_size, self.width = block_size, width
        self._states = torch.zeros(num_blocks * block_size, width, dtype=dtype)
        self._on_their_way: list[Callable[[], object]] = []  # what is to be done to the states, in order

    def write(self, slots: Sequence[int], states: torch.Tensor) -> None:
        """Keep the states [num_tokens, width] of the tokens in `slots`, without waiting for their device."""
        assert states.shape == (len(slots), self.width), (states.shape, len(slots), self.width)
        self._settle(max_left=MAX_ON_THEIR_WAY - 1)
        rows, coming = tuple(slots), CopyBack(states.to(self._states.dtype))
        self._on_their_way.append(lambda: self._states.index_copy_(0, torch.tensor(rows), coming.wait()))

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Follow an accepted tree path as soon as it is known: a drafter is told before the next batch moves the KV."""
        if sources:
            self._settle()
            moved = self._states.index_select(0, torch.tensor(sources))
            self._states.index_copy_(0, torch.tensor(targets), moved)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Follow a copy of the KV's blocks, once what was written before has come."""
        if sources:
            blocks = self._states.view(-1, self.block_size * self.width)
            read, written = torch.tensor(sources), torch.tensor(targets)
            self._on_their_way.append(lambda: blocks.index_copy_(0, written, blocks.index_select(0, read)))

    def read(self, block_table: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Return the states of a sequence's positions [start, stop): [stop - start, width], a copy."""
        self._settle()
        slots = slots_of(block_table, range(start, stop), self.block_size)
        return self._states.index_select(0, torch.tensor(slots, dtype=torch.int64))

    def _settle(self, max_left: int = 0) -> None:
        """Do what is to be done, all but the last `max_left`."""
        num_due = max(0, len(self._on_their_way) - max_left)
        due, self._on_their_way = self._on_their_way[:num_due], self._on_their_way[num_due:]
        for do in due:
            do()

    def messages(self, request: Request, start: int, stop: int) -> Iterator[States]:
        """Say the states of a request's positions [start, stop), in frames that a link carries easily."""
        num_per_message = max(1, MAX_MESSAGE_BYTES // (self.width * self._states.element_size()))
        for first in range(start, stop, num_per_message):
            states = self.read(request.block_table, first, min(stop, first + num_per_message))
            yield States(
                request_id=request.request_id,
                position=first,
                dtype=str(states.dtype).removeprefix("torch."),
                width=self.width,
                # not copied: whoever sends it reads it where it is
                data=cast(bytes, states.view(torch.uint8).flatten().numpy().data),
            )
