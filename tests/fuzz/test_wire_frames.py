"""The frame decoder against hostile bytes: a message or `WireError` comes out, in bounded memory and time."""

from __future__ import annotations

import struct
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.budget import examples
from fuzz.frames import FRAMES, MESSAGE_TYPES, MESSAGES, PLAIN, replace_value, spoilt_frames
from fuzz.tally import TALLY
from outrider.verifier_service.messages.link import peek_request_ids, peek_type
from outrider.verifier_service.messages.wire import WireError, decode, encode

MAX_BYTES_PER_BYTE = 160  # the worst is a one-byte empty map, which Python holds in 64 bytes and a place in a list
FIXED_BYTES = 1 << 18
TYPE_NAMES = sorted(message_type.__name__ for message_type in MESSAGE_TYPES)


def decodes_or_is_refused(payload: bytes, target: str) -> None:
    """Decode, and peek as the link does: no exception but `WireError`; what decodes survives another round trip."""
    assert isinstance(peek_type(payload), str | None)
    assert isinstance(peek_request_ids(payload), tuple)
    try:
        message = decode(payload, MESSAGE_TYPES)
    except WireError:
        TALLY.count(target, "refused")
        return
    TALLY.count(target, "decoded")
    assert type(message) in MESSAGE_TYPES
    again = encode(message)
    assert encode(decode(again, MESSAGE_TYPES)) == again


@examples(300)
@given(MESSAGES)
def test_every_valid_message_survives_the_wire(message: Any) -> None:
    payload = encode(message)
    assert peek_type(payload) == type(message).__name__
    decoded = decode(payload, MESSAGE_TYPES)
    assert decoded == message
    assert type(decoded) is type(message)
    TALLY.count("frames: valid messages", "equal")


@examples(300)
@given(st.binary(max_size=300))
def test_random_bytes(payload: bytes) -> None:
    decodes_or_is_refused(payload, "frames: random bytes")


@examples(400)
@given(spoilt_frames())
def test_spoilt_frames(payload: bytes) -> None:
    decodes_or_is_refused(payload, "frames: spoilt messages")


@examples(400)
@given(FRAMES, st.data())
def test_one_wrong_value(payload: bytes, data: st.DataObject) -> None:
    decodes_or_is_refused(replace_value(payload, data), "frames: one wrong value")


@examples(200)
@given(st.sampled_from(TYPE_NAMES), st.dictionaries(st.text(max_size=8), PLAIN, max_size=4))
def test_invented_fields(name: str, fields: dict[str, Any]) -> None:
    decodes_or_is_refused(msgpack.packb([name, fields]), "frames: invented fields")


@pytest.mark.parametrize("item", [b"\xc0", b"\x80", b"\x90", b"\x91\x80", b"\x81\xa1a\x80", b"\xcb" + b"\xff" * 8])
@pytest.mark.parametrize("field", ["token_ids", "draft_probs", "nobody"])
def test_memory_stays_in_proportion_to_the_frame(item: bytes, field: str) -> None:
    num_items = (1 << 16) // len(item)
    head = msgpack.packb({"request_id": "r", "round_id": 1, "position": 0})[1:]
    payload = (
        b"\x92"
        + msgpack.packb("Draft")
        + b"\x84"
        + head
        + msgpack.packb(field)
        + struct.pack(">BI", 0xDD, num_items)
        + item * num_items
    )
    assert _peak_bytes(payload) < len(payload) * MAX_BYTES_PER_BYTE + FIXED_BYTES


@pytest.mark.parametrize("header", [0xDD, 0xDF, 0xDB, 0xC6, 0xC9])
@pytest.mark.parametrize("before", [b"", b"\x92", b"\x92\xa5Draft", b"\x92\xa5Draft\x81\xa9token_ids"])
def test_an_announced_length_reserves_no_memory(before: bytes, header: int) -> None:
    payload = before + struct.pack(">BI", header, (1 << 32) - 1)
    assert _peak_bytes(payload) < FIXED_BYTES


def _peak_bytes(payload: bytes) -> int:
    """Return the most memory that was held while a frame was refused."""
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            decode(payload, MESSAGE_TYPES)
        TALLY.count("frames: memory", "refused")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
