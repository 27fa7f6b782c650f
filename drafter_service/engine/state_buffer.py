"""The target's hidden states of one session, as they arrive.

A row that begins with NaN marks a state that the target no longer has; only the first rows may be so marked. Other
values that are not finite are refused here: in a drafter's KV they would spread to every session of the same forward,
masked or not.
"""

from __future__ import annotations

import torch

from outrider.verifier_service.links.tensor_channel import as_tensor
from outrider.verifier_service.messages.draft import DraftNeeds, States

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_STATE = 1e9  # beyond what any model makes; products of a few such numbers are still finite


class UnusableStatesError(ValueError):
    """States that are no better when sent again."""


class StateBuffer:
    """States of the first tokens, or of the last one alone: [num_states, width], grown by doubling."""

    def __init__(self) -> None:
        self._states: torch.Tensor | None = None  # [capacity, width]
        self._num_states = 0

    @property
    def tensor(self) -> torch.Tensor | None:
        """The states so far, float32 [num_states, width]: a view; None where none has come."""
        return None if self._states is None else self._states[: self._num_states]

    @property
    def num_bytes(self) -> int:
        """Bytes held, with the room to grow."""
        return 0 if self._states is None else self._states.nbytes

    def append(self, message: States, needs: DraftNeeds) -> None:
        """Append a message's states; raises `ValueError` naming the field that does not fit the states before."""
        states = _decoded(message)
        if needs.last_state_only:
            last = states[-1:]
            is_known = _num_missing(last) == 0
            # a copy, or the whole message would be held
            self._states, self._num_states = (last.clone(), 1) if is_known else (None, 0)
            return
        if message.position != self._num_states:
            raise ValueError(f"position: states from {message.position} on, {self._num_states} are here")
        if self._states is not None and message.width != self._states.shape[1]:
            raise ValueError(f"width: {message.width}, the states before have {self._states.shape[1]}")
        if _num_missing(states) and not self._ends_missing():
            raise UnusableStatesError(f"data: states from {message.position} on are missing, those before are not")
        stop = self._num_states + len(states)
        self._states = _grown(self._states, stop, message.width)
        self._states[self._num_states : stop] = states
        self._num_states = stop

    def _ends_missing(self) -> bool:
        """Return whether the last state so far is missing, so that all are."""
        return self._states is None or bool(self._states[self._num_states - 1, 0].isnan())


def _decoded(message: States) -> torch.Tensor:
    """Read float32 [num_tokens, width] out of a message."""
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        raise ValueError(f"dtype: {message.dtype!r} is none of {', '.join(DTYPES)}")
    if message.width < 1 or not message.data or len(message.data) % (message.width * dtype.itemsize):
        raise ValueError(f"data: {len(message.data)} bytes are no rows of {message.width} {message.dtype}")
    return as_tensor(message.data).view(dtype).view(-1, message.width).float()


def _num_missing(states: torch.Tensor) -> int:
    """Count the first rows, which are missing; raises `UnusableStatesError` unless all others are usable."""
    is_usable = states.abs().amax(dim=1) <= MAX_STATE  # [num_tokens]; NaN is not
    num_missing = int((~is_usable).sum())
    if num_missing and not (is_usable[num_missing:].all() and states[:num_missing, 0].isnan().all()):
        raise UnusableStatesError(f"data: states that are not finite, or beyond {MAX_STATE:g}")
    return num_missing


def _grown(states: torch.Tensor | None, num_states: int, width: int) -> torch.Tensor:
    if states is not None and len(states) >= num_states:
        return states
    grown = torch.empty(1 << (num_states - 1).bit_length(), width)
    if states is not None:
        grown[: len(states)] = states
    return grown
