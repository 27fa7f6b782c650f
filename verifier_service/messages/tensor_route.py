"""Where hidden states go when not in the frames of a link: which transport, and where its two ends meet.

States always *can* travel as bytes in the link's own frames, encrypted where it is. Beside it a link may have a
channel from engine to engine (see `tensor_channel`): the frame then only names the tensor. The verifier says in its
`Hello` which transports it can do, the drafter's `Welcome` names the one that is taken and where to meet, or none.
Which messages then go through the channel is measured (see `state_ways`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GRPC = "grpc"  # in the frames themselves
GLOO = "gloo"
NCCL = "nccl"
Transport = Literal[
    "auto", "grpc", "gloo", "nccl"
]  # as an operator names them; auto: gloo, but for links that are encrypted


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRoute:
    """One channel: its transport, the "host:port" of the drafter's store, and the channel's own name there."""

    transport: str
    store: str
    group: str  # never used twice


def offered_transports(choice: str, *, is_encrypted: bool) -> tuple[str, ...]:
    """Return the channels that an end offers, best first, for an operator's choice: none encrypts anything."""
    if is_encrypted or choice == GRPC:
        return ()
    return (GLOO,) if choice == "auto" else (choice,)


def choose_transport(wanted: Sequence[str], offered: Sequence[str]) -> str | None:
    """Return the first of the wanted transports that the other side can do, or None: bytes in frames."""
    return next((transport for transport in wanted if transport in offered), None)
