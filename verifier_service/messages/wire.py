"""Encode dataclasses as msgpack and decode them, checked against the declared types.

One codec for every hop: engine process, tensor-parallel followers, verifier-drafter link, gateway-verifier stream.
A message travels as `[class name, {field: value, ...}]`, nested dataclasses as maps, enums by value. Decoding executes
nothing (no pickle); its errors name the field. Columns (see `columns`) travel as bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec

from outrider.verifier_service.messages.columns import packed_column, unpacked_column

MAX_FRAME_BYTES = 64 << 20

_encoder = msgspec.msgpack.Encoder(enc_hook=packed_column)
_envelope_decoder = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a shell reads of a request."""

    request_id: str
    most_waiting: Any = None  # whatever its type: what is wrong with a request the engine says


_head_decoder = msgspec.msgpack.Decoder(RequestHead)


class WireError(ValueError):
    """A frame is malformed or of an unexpected type; the text names message and field."""


def encode(message: Any) -> bytes:
    """Pack a dataclass instance; its class name is its type on the wire."""
    return _encoder.encode((type(message).__name__, message))


def packed(message: Any) -> msgspec.Raw:
    """Pack a dataclass instance for a field of another message, which may pass it on unopened."""
    return msgspec.Raw(_encoder.encode(message))


def unpacked(raw: msgspec.Raw, message_type: type) -> Any:
    """Unpack what `packed` made of a `message_type`, or raise `WireError`."""
    return _opened(message_type.__name__, raw, _decoders((message_type,)))


def decode(payload: bytes, message_types: Sequence[type]) -> Any:
    """Unpack one of `message_types`, or raise `WireError`. Unknown fields are ignored."""
    return _decoded(payload, _decoders(tuple(message_types)))


def head_of(payload: bytes, message_type: type) -> RequestHead:
    """Return the head of an encoded `message_type`, whose other fields stay unread, or raise `WireError`."""
    head: RequestHead = _decoded(payload, {message_type.__name__: _head_decoder})
    return head


def _decoded(payload: bytes, decoders: Mapping[str, msgspec.msgpack.Decoder[Any]]) -> Any:
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    try:
        name, fields = _envelope_decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"frame is no message: {error}") from error
    if name not in decoders:
        raise WireError(f"unexpected message type {name[:80]!r}; expected one of {sorted(decoders)}")
    return _opened(name, fields, decoders)


def _opened(name: str, fields: msgspec.Raw, decoders: Mapping[str, msgspec.msgpack.Decoder[Any]]) -> Any:
    try:
        return decoders[name].decode(fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"{name}: {error}") from error


@cache
def _decoders(message_types: tuple[type, ...]) -> dict[str, msgspec.msgpack.Decoder[Any]]:
    decoder = partial(msgspec.msgpack.Decoder, dec_hook=unpacked_column)
    return {message_type.__name__: decoder(message_type) for message_type in message_types}
