"""The target's hidden states of one session, as they arrive."""

from __future__ import annotations

import torch

from outrider.verifier_service.drafting import DraftNeeds, States

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FIRST_CAPACITY = 64


class StateBuffer:
    """States of the first tokens, or of the last one alone: [num_states, width], grown by doubling."""

    def __init__(self) -> None:
        self._states: torch.Tensor | None = None  # [capacity, width]
        self._num_states = 0

    @property
    def tensor(self) -> torch.Tensor | None:
        """The states so far, float32 [num_states, width]: a view; None where none has come."""
        return None if self._states is None else self._states[: self._num_states]

    def append(self, message: States, needs: DraftNeeds) -> None:
        """Take in a message; raises `ValueError` naming the field when it does not fit what is here."""
        states = _decoded(message)
        if needs.last_state_only:
            self._states, self._num_states = states[-1:], 1
            return
        if message.position != self._num_states:
            raise ValueError(f"position: states from {message.position} on, {self._num_states} are here")
        if self._states is not None and message.width != self._states.shape[1]:
            raise ValueError(f"width: {message.width}, the states before have {self._states.shape[1]}")
        stop = self._num_states + len(states)
        self._states = _grown(self._states, stop, message.width)
        self._states[self._num_states : stop] = states
        self._num_states = stop


def _decoded(message: States) -> torch.Tensor:
    """Read float32 [num_tokens, width] out of a message."""
    dtype = DTYPES.get(message.dtype)
    if dtype is None:
        raise ValueError(f"dtype: {message.dtype!r} is none of {', '.join(DTYPES)}")
    if message.width < 1 or not message.data or len(message.data) % (message.width * dtype.itemsize):
        raise ValueError(f"data: {len(message.data)} bytes are no rows of {message.width} {message.dtype}")
    return torch.frombuffer(bytearray(message.data), dtype=dtype).view(-1, message.width).float()


def _grown(states: torch.Tensor | None, num_states: int, width: int) -> torch.Tensor:
    if states is not None and len(states) >= num_states:
        return states
    capacity = max(FIRST_CAPACITY, 1 << (num_states - 1).bit_length())
    grown = torch.empty(capacity, width)
    if states is not None:
        grown[: len(states)] = states
    return grown
