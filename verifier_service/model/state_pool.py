"""The target's tapped hidden states, for drafters that read them: one per KV slot.

A state is addressed by its token's KV slot and so needs no bookkeeping of its own: a prefix hit finds it, forks and
accepted tree paths move it, and reusing its block overwrites it. All states of a cached prefix can be sent to a new,
resynced or replaced drafter without recomputing them. They are in host memory: 3 taps of an 8B model in half precision
take 24 KiB per token, its KV 128 KiB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch

from outrider.verifier_service.gpu.transfers import CopyBack
from outrider.verifier_service.messages.batch import slots_of
from outrider.verifier_service.messages.draft import FINAL_TAP, States
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.model.attention import fresh_zeros

MAX_PENDING = 2  # writes in flight; by the time of a third, the copy of the first has arrived
MAX_MESSAGE_BYTES = 4 << 20  # of states per message: a long prompt must not delay other requests' drafts


def require_taps(taps: Sequence[int], num_layers: int) -> None:
    """Raise `ValueError` for a tap beyond the model's layers."""
    for tap in taps:
        if tap != FINAL_TAP and not 0 <= tap < num_layers:
            raise ValueError(f"state_taps: layer {tap}, the model has {num_layers}")


def resolve_state_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which states are kept and sent; auto: the model's."""
    dtype = model_dtype if name == "auto" else getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class StatePool:
    """Tapped states of all slots: [num_blocks * block_size, width]."""

    def __init__(self, *, num_blocks: int, block_size: int, width: int, dtype: torch.dtype) -> None:
        self.block_size, self.width, self.dtype = block_size, width, dtype
        self._states = fresh_zeros(num_blocks * block_size, width, dtype=dtype, device=torch.device("cpu"))
        self._pending: list[Callable[[], object]] = []  # updates of the states, in order

    @property
    def num_bytes_per_token(self) -> int:
        return self.width * self.dtype.itemsize

    def write(self, slots: Sequence[int], states: torch.Tensor) -> None:
        """Store the states [num_tokens, width] of the tokens in `slots`, without waiting for their device."""
        assert states.shape == (len(slots), self.width), (states.shape, len(slots), self.width)
        self._apply_pending(max_left=MAX_PENDING - 1)
        rows, copy = tuple(slots), CopyBack(states.to(self.dtype))
        self._pending.append(lambda: self._states.index_copy_(0, torch.tensor(rows), copy.wait()))

    def move_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move the states of accepted tree paths at commit: drafters get them before the next batch moves the KV."""
        if sources:
            self._apply_pending()
            moved = self._states.index_select(0, torch.tensor(sources))
            self._states.index_copy_(0, torch.tensor(targets), moved)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states of copied KV blocks, after all earlier writes."""
        if sources:
            blocks = self._states.view(-1, self.block_size * self.width)
            read, written = torch.tensor(sources), torch.tensor(targets)
            self._pending.append(lambda: blocks.index_copy_(0, written, blocks.index_select(0, read)))

    def read(self, block_table: Sequence[int], start: int, stop: int) -> torch.Tensor:
        """Return a copy of the states of a sequence's positions [start, stop): [stop - start, width]."""
        self._apply_pending()
        slots = slots_of(block_table, range(start, stop), self.block_size)
        return self._states.index_select(0, torch.tensor(slots, dtype=torch.int64))

    def _apply_pending(self, max_left: int = 0) -> None:
        """Apply all pending updates but the last `max_left`."""
        num_due = max(0, len(self._pending) - max_left)
        due, self._pending = self._pending[:num_due], self._pending[num_due:]
        for update in due:
            update()

    def messages(self, request: Request, start: int, stop: int) -> Iterator[States]:
        """Yield messages with the states of a request's positions [start, stop), each at most `MAX_MESSAGE_BYTES`."""
        num_per_message = max(1, MAX_MESSAGE_BYTES // self.num_bytes_per_token)
        for first in range(start, stop, num_per_message):
            states = self.read(request.block_table, first, min(stop, first + num_per_message))
            yield States(
                request_id=request.request_id,
                position=first,
                dtype=str(states.dtype).removeprefix("torch."),
                width=self.width,
                # a view, not a copy
                data=cast(bytes, states.view(torch.uint8).flatten().numpy().data),
            )
