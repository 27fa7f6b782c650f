"""The tensor channel of a link: its transport, and where its two ends meet.

Hidden states can always travel as bytes in the link's frames, encrypted if the link is. A link may also have a tensor
channel from engine to engine (see `tensor_channel`); a frame then only names the tensor. The verifier's `Hello` offers
transports; the drafter's `Welcome` names the chosen one and its store, or none. `state_ways` chooses, message by
message, between frames and channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

GRPC = "grpc"  # in the link's frames
GLOO = "gloo"
NCCL = "nccl"
# an operator's choice; auto: gloo, but frames on an encrypted link
Transport = Literal["auto", "grpc", "gloo", "nccl"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRoute:
    """One channel: its transport, the "host:port" of the drafter's store, and the channel's name there."""

    transport: str
    store: str
    group: str  # never used twice


def offered_transports(choice: str, *, is_encrypted: bool) -> tuple[str, ...]:
    """Return the channels to offer for an operator's choice, best first; none on an encrypted link."""
    if is_encrypted or choice == GRPC:
        return ()
    return (GLOO,) if choice == "auto" else (choice,)


def choose_transport(wanted: Sequence[str], offered: Sequence[str]) -> str | None:
    """Return the first of the wanted transports that the other side offers; None: bytes in frames."""
    return next((transport for transport in wanted if transport in offered), None)
