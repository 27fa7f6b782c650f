"""Turn dataclasses into msgpack bytes and back, refusing whatever does not fit the declared types.

One codec serves every hop: engine process, tensor-parallel followers, verifier-drafter link, gateway-verifier stream.
A message travels as a map `{"type": class name, field: value, ...}`; nested dataclasses travel as maps, enums by
value. Decoding never executes anything (no pickle) and names the offending field in its error.

Every declared type is compiled once into a writer and a reader, so that a message costs no look at its type hints.
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import msgpack

MAX_FRAME_BYTES = 64 << 20
_INT64_MAX = (1 << 63) - 1  # msgpack carries up to 64 unsigned bits above, exactly the signed 64 below


class WireError(ValueError):
    """A frame that is not one of the expected messages; the text names the message and field."""


class _Misfit(Exception):
    """A value that does not fit its type; `path` grows on the way out, so that a good value costs no text."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path

    def under(self, parent: str) -> _Misfit:
        return _Misfit(self.problem, parent + self.path)


Writer = Callable[[Any], Any]
Reader = Callable[[Any], Any]


def encode(message: Any) -> bytes:
    """Pack a dataclass instance; its class name is its type on the wire."""
    message_type: Any = type(message)
    return msgpack.packb({"type": message_type.__name__, **_dataclass_writer(message_type)(message)})


def decode(payload: bytes, message_types: Sequence[type]) -> Any:
    """Unpack one of `message_types`, or raise `WireError`."""
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {len(payload)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    try:
        fields = msgpack.unpackb(payload, strict_map_key=True, use_list=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"frame is not msgpack: {error}") from error
    if type(fields) is not dict:
        raise WireError("frame is not a map")
    name = fields.pop("type", None)
    readers = _message_readers(tuple(message_types))
    if type(name) is not str or name not in readers:
        raise WireError(f"unexpected message type {_shown(name)}; expected one of {sorted(readers)}")
    try:
        return readers[name](fields)
    except _Misfit as misfit:
        raise WireError(f"{name}{misfit.path}: {misfit.problem}") from misfit


@cache
def _message_readers(message_types: tuple[type, ...]) -> dict[str, Reader]:
    return {message_type.__name__: _reader(message_type) for message_type in message_types}


def _shown(value: Any) -> str:
    """Quote a scalar; of anything else name only the type, for a hostile frame can nest beyond Python's own repr."""
    return repr(value)[:80] if type(value) in (str, int, float, bool) else type(value).__name__


def _is_message(target: Any) -> bool:
    return dataclasses.is_dataclass(target)


# Writers: None stands for "as it is", which is what token ids and all other scalars need.


@cache
def _writer(target: Any) -> Writer | None:
    if _is_message(target):
        return _dataclass_writer(target)
    if isinstance(target, type) and issubclass(target, enum.Enum):
        return lambda member: member.value
    origin, arguments = typing.get_origin(target), typing.get_args(target)
    if origin in (typing.Union, types.UnionType):
        return _map_writer(_optional_argument(arguments), lambda write, value: None if value is None else write(value))
    if origin in (tuple, list):
        return _map_writer(_item_type(target), lambda write, values: [write(value) for value in values])
    if origin is dict:
        return _map_writer(arguments[1], lambda write, values: {key: write(value) for key, value in values.items()})
    return None


def _map_writer(inner: Any, apply: Callable[[Writer, Any], Any]) -> Writer | None:
    """Return the writer that applies `inner`'s own, or None where that is none."""
    write = _writer(inner)
    return None if write is None else partial(apply, write)


@cache
def _dataclass_writer(target: Any) -> Writer:
    hints = typing.get_type_hints(target)
    names = [field.name for field in dataclasses.fields(target)]
    assert "type" not in names, "the field `type` would hide the message's own type on the wire"
    writers = [(name, write) for name in names if (write := _writer(hints[name]))]

    def write_fields(message: Any) -> dict[str, Any]:
        fields = {name: getattr(message, name) for name in names}
        for name, write in writers:
            fields[name] = write(fields[name])
        return fields

    return write_fields


# Readers: each checks a plain value and converts it to its target.


@cache
def _reader(target: Any) -> Reader:
    if _is_message(target):
        return _dataclass_reader(target)
    if isinstance(target, type) and issubclass(target, enum.Enum):
        return _enum_reader(target)
    origin, arguments = typing.get_origin(target), typing.get_args(target)
    if origin in (typing.Union, types.UnionType):
        read = _reader(_optional_argument(arguments))
        return lambda value: None if value is None else read(value)
    if origin in (tuple, list):
        return _int_sequence_reader(origin) if _item_type(target) is int else _sequence_reader(target)
    if origin is dict:
        return _dict_reader(*arguments)
    return _scalar_reader(target)


def _optional_argument(arguments: tuple[Any, ...]) -> Any:
    inner = [argument for argument in arguments if argument is not type(None)]
    assert (len(inner), len(arguments)) == (1, 2), "only `X | None` unions cross the wire"
    return inner[0]


def _item_type(target: Any) -> Any:
    arguments = typing.get_args(target)
    assert len(arguments) == 1 or arguments[1:] == (...,), "only tuples of one item type cross the wire"
    return arguments[0]


def _dataclass_reader(target: Any) -> Reader:
    hints = typing.get_type_hints(target)
    fields = dataclasses.fields(target)
    readers = {field.name: _reader(hints[field.name]) for field in fields}
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any) -> Any:
        _require_map(value)
        if not value.keys() <= readers.keys():
            raise _Misfit(f"unknown field {min(_shown(name) for name in value.keys() - readers.keys())}")
        if not required <= value.keys():
            raise _Misfit("missing", f".{min(required - value.keys())}")
        try:
            return target(**{name: _read_at(f".{name}", readers[name], item) for name, item in value.items()})
        except ValueError as error:  # the dataclass's own validation
            raise _Misfit(str(error)) from error

    return read


def _read_at(path: str, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except _Misfit as misfit:
        raise misfit.under(path) from None


def _enum_reader(target: type[enum.Enum]) -> Reader:
    members = {member.value: member for member in target}

    def read(value: Any) -> enum.Enum:
        if type(value) is not str or value not in members:
            raise _Misfit(f"{_shown(value)} is not a {target.__name__}")
        return members[value]

    assert all(type(value) is str for value in members), "only enums of strings cross the wire"
    return read


def _sequence_reader(target: Any) -> Reader:
    origin, read_item = typing.get_origin(target), _reader(_item_type(target))

    def read(values: Any) -> Any:
        _require_list(values)
        try:
            return origin([read_item(value) for value in values])
        except _Misfit:  # rare: go again for the index
            return origin([_read_at(f"[{index}]", read_item, value) for index, value in enumerate(values)])

    return read


def _int_sequence_reader(origin: Any) -> Reader:
    """Read token ids, slots, blocks: most of all traffic, so no Python code runs per item."""
    only_int = {int}

    def read(values: Any) -> Any:
        _require_list(values)
        if values and (set(map(type, values)) != only_int or max(values) > _INT64_MAX):
            read_item = _reader(int)
            for index, value in enumerate(values):
                _read_at(f"[{index}]", read_item, value)
        return values if origin is list else origin(values)

    return read


def _dict_reader(key_type: Any, item_type: Any) -> Reader:
    read_key, read_item = _reader(key_type), _reader(item_type)

    def read(values: Any) -> Any:
        _require_map(values)
        return {
            _read_at(" key", read_key, key): _read_at(f"[{_shown(key)}]", read_item, item)
            for key, item in values.items()
        }

    return read


def _require_map(value: Any) -> None:
    if type(value) is not dict:
        raise _Misfit("expected a map")


def _require_list(value: Any) -> None:
    if type(value) is not list:
        raise _Misfit("expected a list")


def _scalar_reader(target: type) -> Reader:
    def read(value: Any) -> Any:
        if type(value) is target:
            return value
        raise _Misfit(f"expected {target.__name__}, got {type(value).__name__}")

    def read_int(value: Any) -> int:
        if type(value) is int and value <= _INT64_MAX:
            return value
        raise _Misfit("expected a 64-bit integer")

    def read_float(value: Any) -> float:
        if type(value) in (float, int):
            return float(value)
        raise _Misfit(f"expected float, got {type(value).__name__}")

    special: dict[type, Reader] = {int: read_int, float: read_float}
    assert target in (bool, bytes, float, int, str), f"{target} does not cross the wire"
    return special.get(target, read)
