"""What a gateway and a verifier say of requests, over one stream for all of them.

    up    GenerationRequest ... Cancel       of any number of requests
    down  Accepted or Refused; StepOutputs   a step's outputs of all this gateway's requests in one message

An output with a finish reason is a request's last; so is a refusal. The stream's end is the loss of all its requests.

A verifier numbers the requests that it takes, of all gateways, and its reports say how many those were: so a gateway
knows which of its own a report includes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from outrider.verifier_service.messages.engine import Cancel
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The engine has the request. If the verifier dies later, the request may be the cause."""

    request_id: str
    num_taken: int = 0  # requests that the verifier had taken by then, this one included


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The request has ended here without an output."""

    request_id: str
    error: str
    is_lost: bool = False  # another verifier may serve it: this one has no engine, or stops, or is full
    is_full: bool = False  # more requests would wait here than it allows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """Outputs in the order of their commits."""

    outputs: tuple[RequestOutput, ...]

    @classmethod
    def unopened(cls, outputs: Sequence[msgspec.Raw]) -> StepOutputs:
        """Return a message of packed outputs, which is good for encoding alone."""
        return cls(outputs=tuple(outputs))  # type: ignore[arg-type]


FROM_GATEWAY = (GenerationRequest, Cancel)
TO_GATEWAY = (Accepted, Refused, StepOutputs)
