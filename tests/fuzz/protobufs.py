"""Protobuf messages from their descriptors: valid on the wire, with values that mean nothing."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_KIND = FieldDescriptor
_SMALL = st.integers(0, 300)  # as likely to be a valid token id, count or index as not
_SIGNED_32 = _SMALL | st.integers(-(1 << 31), (1 << 31) - 1)
_UNSIGNED_32 = _SMALL | st.integers(0, (1 << 32) - 1)
_SIGNED_64 = _SMALL | st.integers(-(1 << 63), (1 << 63) - 1)
_UNSIGNED_64 = _SMALL | st.integers(0, (1 << 64) - 1)
_FLOATS = st.floats(0.0, 1.0, width=32) | st.floats(width=32)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    _KIND.CPPTYPE_INT32: _SIGNED_32,
    _KIND.CPPTYPE_UINT32: _UNSIGNED_32,
    _KIND.CPPTYPE_INT64: _SIGNED_64,
    _KIND.CPPTYPE_UINT64: _UNSIGNED_64,
    _KIND.CPPTYPE_FLOAT: _FLOATS,
    _KIND.CPPTYPE_DOUBLE: st.floats(),
    _KIND.CPPTYPE_BOOL: st.booleans(),
    _KIND.CPPTYPE_STRING: st.text(max_size=30),
    _KIND.CPPTYPE_ENUM: st.integers(0, 5),
}
MAX_DEPTH = 4


@st.composite
def messages_of(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Draw a message with a few of its fields set; at most one of a oneof stays, as protobuf has it."""
    message = GetMessageClass(descriptor)()
    fields = [field for field in descriptor.fields if field.message_type is None or depth < MAX_DEPTH]
    chosen = draw(st.lists(st.sampled_from(fields), max_size=8, unique=True)) if fields else []
    for field in chosen:
        _fill(draw, message, field, depth)
    return message


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    target = getattr(message, field.name)
    nested = field.message_type
    if nested is not None and nested.GetOptions().map_entry:
        key, value = nested.fields_by_name["key"], nested.fields_by_name["value"]
        if value.message_type is None:
            target.update(draw(st.dictionaries(_scalar(key), _scalar(value), max_size=3)))
    elif field.is_repeated:
        items = _scalar(field) if nested is None else messages_of(nested, depth + 1)
        target.extend(draw(st.lists(items, max_size=4)))
    elif nested is not None:
        target.CopyFrom(draw(messages_of(nested, depth + 1)))
        target.SetInParent()
    else:
        setattr(message, field.name, draw(_scalar(field)))


def _scalar(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    return st.binary(max_size=30) if field.type == _KIND.TYPE_BYTES else _SCALARS[field.cpp_type]


@st.composite
def spoilt(draw: st.DrawFn, messages: st.SearchStrategy[Message]) -> bytes:
    """Draw a message's bytes with some cut out, overwritten or put in."""
    payload = draw(messages).SerializeToString()
    for _ in range(draw(st.integers(1, 3))):
        start, end = sorted(draw(st.tuples(st.integers(0, len(payload)), st.integers(0, len(payload)))))
        payload = payload[:start] + draw(st.binary(max_size=6)) + payload[min(end, start + 6) :]
    return payload
