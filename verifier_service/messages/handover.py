"""A request that changes its verifier with its KV: what the giver, the taker and their shells tell each other.

    gateway         taker's engine      taker's shell        giver's shell       giver's engine
       | request with kv_source |            |                    |                     |
       |----------------------->| PullKV     |                    |                     |
       |                        |----------->| VerifierLink.TakeKV| TakeKV              |
       |                        |            |------------------->|-------------------->| KV of the prompt, as it is
       |                        |            |                    |                     | computed, part by part
       |                        |<-----------|<-------------------|<--------------------| KVPart, KVPart ...
       |<- - - - - - - - - - - - - - - - - - first token, `is_held` - - - - - - - - - - |
       |                        |<-----------|<-------------------|<--------------------| KVEnd
       |<- - tokens - - - - - - |            |                    |                     |
       | ends the giver's stream  - - - - - - - - - - - - - - - - - - - - - - - - - - ->| frees the KV

The taker draws no token unless it has all: else its only output is `FinishReason.NOT_TAKEN`, and the gateway, which
knows what was published, sends the request again without a source. So no token is drawn twice, whatever fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.verifier_service.messages.tensor_route import TensorRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Where the KV of a request is: at a verifier that has held it, or will after its first token."""

    endpoint: str  # "host:port" of that verifier's port for gateways
    request_id: str  # what it is called there
    draws_anew: bool = False  # the taker keeps the prompt's KV alone and draws the first token itself


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """To an engine whose verifier drains, or is full: hold requests that decode, for other verifiers to take.

    Each gets an output without tokens and with `is_held`. A request that nobody takes goes on by itself.
    """

    max_held: int | None = None  # so many are held at a time, those that are held already included; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTerms:
    """What a taker can take. The giver refuses if the KV is not what the taker would have computed itself."""

    fingerprint: str  # of model, weights, dtype, block size, rotary embedding, taps: see `kv_fingerprint`
    weight_version: str
    tensors: TensorRoute | None = None  # the taker's tensor channel; None: KV goes as bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeKV:
    """Ask a giver's engine for a request's KV; its shell gives every call an id."""

    take_id: str
    request_id: str
    terms: KVTerms


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTake:
    """The taker has hung up: it has all, or it is gone."""

    take_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsRead:
    """The taker has read frames of so many bytes: as many more may be on their way to it."""

    take_id: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPart:
    """KV and tapped states of positions [start, stop), which follow those of the part before.

    Bytes of each position: per layer, in order, keys [num_kv_heads, head_dim] and values, of all ranks' heads; then its
    states [width], where there are any.
    """

    start: int
    stop: int
    data: bytes  # empty if sent through the tensor channel
    tensor: int = 0  # number of the channel's tensor that holds the data; 0: `data` does
    num_bytes: int = 0  # size of that tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEnd:
    """All is sent: KV of all tokens but the last."""

    output_token_ids: tuple[int, ...]  # all so far
    num_tokens: int  # prompt included


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRefused:
    """Nothing more comes: the request is not here, has gone on, or its KV does not fit."""

    reason: str


class ArrivedPart(NamedTuple):
    """The bytes of positions [start, stop), on a taker's host."""

    start: int
    stop: int
    data: bytes | memoryview


class ArrivedKV(NamedTuple):
    """A request's KV on its taker's host, until blocks are free for it."""

    num_tokens: int  # positions that the request goes on from
    parts: Sequence[ArrivedPart]  # in order, from 0


GIVER_MESSAGES = (KVPart, KVEnd, KVRefused)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFrame:
    """A frame of a giver's engine to one taker, still encoded."""

    take_id: str
    payload: bytes
    is_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PullKV:
    """A taker's engine asks its shell to call a giver; `terms` None: hang up."""

    request_id: str  # of the taker
    source: KVSource
    terms: KVTerms | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenFrame:
    """A frame of a giver, for a taker's engine; the payload of a call that has ended is empty."""

    request_id: str
    payload: bytes
    error: str = ""  # why the call has ended


HANDOVER_MESSAGES = (HandOver, TakeKV, EndTake, PartsRead, TakenFrame)  # to an engine
