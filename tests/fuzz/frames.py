"""Valid messages of every type that crosses the wire, and frames spoilt in every way a hostile peer might think of."""

from __future__ import annotations

import dataclasses
import enum
import struct
import types
import typing
from collections.abc import Callable
from functools import cache
from typing import Any

import msgpack
import msgspec
from hypothesis import strategies as st

from outrider.drafter_service.engine.messages import FROM_DRAFT_ENGINE, TO_DRAFT_ENGINE
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.beam_search import BeamSearch
from outrider.verifier_service.messages.draft import Commit, Commits, Draft, Drafts, DraftSampling, SparseRow
from outrider.verifier_service.messages.engine import FROM_ENGINE, TO_ENGINE
from outrider.verifier_service.messages.history import PastResponse
from outrider.verifier_service.messages.link import (
    DRAFTER_MESSAGES,
    VERIFIER_MESSAGES,
    Hello,
    Ping,
    Pong,
    Refuse,
    Welcome,
)
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    GenerationRequest,
    LogitBias,
    RequestOutput,
    SamplingParams,
    StructuredOutput,
)
from outrider.verifier_service.messages.requests_link import TO_GATEWAY
from outrider.verifier_service.messages.thought import Thought
from outrider.verifier_service.messages.wire import encode, packed

LINK_TYPES = (Hello, Welcome, Refuse, Ping, Pong, *VERIFIER_MESSAGES, *DRAFTER_MESSAGES)
MESSAGE_TYPES = tuple(
    dict.fromkeys(
        (
            *LINK_TYPES,
            *TO_ENGINE,
            *FROM_ENGINE,
            *TO_DRAFT_ENGINE,
            *FROM_DRAFT_ENGINE,
            *TO_GATEWAY,
            RequestOutput,
            SamplingParams,
            ScheduledBatch,
        )
    )
)

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: INTEGERS,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
}
BEAMS = SamplingParams(beams=BeamSearch(width=3, stop=("x",)), num_speculative_tokens=0, max_tokens=20)
# Of the fields that a dataclass itself checks.
_SAMPLING_SHAPE = {
    "temperature": st.floats(0.0, 100.0),
    "top_k": st.integers(0, 1 << 40),
    "top_p": st.floats(0.0, 1.0, exclude_min=True),
    "min_p": st.floats(0.0, 1.0),
    "choice_index": st.integers(0, 1 << 40),
}
CHECKED_FIELDS: dict[type, dict[str, st.SearchStrategy[Any]]] = {
    DraftSampling: _SAMPLING_SHAPE,
    PastResponse: {"age": st.integers(0, 1 << 40)},
    LogitBias: {"bias": st.floats(-100.0, 100.0)},
    GenerationRequest: {
        "priority": st.integers(-1000, 1000),
        "target_inter_token_ms": st.none() | st.floats(0.0, 60_000.0, exclude_min=True),
        "sampling": st.deferred(lambda: values_of(SamplingParams) | st.just(BEAMS)),
    },
    RequestOutput: {"beams": st.just(())},  # outputs of outputs
    SamplingParams: {
        **_SAMPLING_SHAPE,
        "beams": st.none(),  # they allow few others: `BEAMS`
        "max_tokens": st.integers(20, 1 << 40),
        "min_tokens": st.integers(0, 20),
        "bad_words": st.lists(st.lists(INTEGERS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
        "num_speculative_tokens": st.none() | st.integers(0, 1 << 40),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "repetition_penalty": st.floats(0.0, 100.0, exclude_min=True),
        "logprobs": st.none() | st.integers(0, 20),
        "prompt_logprobs": st.none() | st.integers(0, 20),
        "acceptance": st.sampled_from([rule for rule in AcceptanceRule if not rule.is_lossy]),  # with any logprobs_mode
        "typical_epsilon": st.floats(0.0, 1.0, exclude_min=True),
        "typical_delta": st.floats(0.0, 1.0, exclude_min=True),
    },
    Thought: {
        "opening": st.text(min_size=1, max_size=9),
        "closing": st.text(min_size=1, max_size=9),
        "max_tokens": st.none() | st.integers(0, 1 << 40),
    },
    StructuredOutput: {
        "text": st.text(min_size=1, max_size=20),
        "choices": st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=3).map(tuple),
    },
}


def _chain(draft: Draft, has_rows: bool) -> Draft:
    """Make any draft a chain of one of the kinds that are framed."""
    rows = tuple(SparseRow(token_ids=(5, 6), weights=(7, 8)) for _ in draft.token_ids)
    chances = tuple(0.5 for _ in draft.token_ids)
    draft = dataclasses.replace(draft, parents=None, draft_probs=None, confidences=None)
    return dataclasses.replace(draft, **({"draft_probs": rows} if has_rows else {"confidences": chances}))


def _frames_of(kind: type, rows: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(rows, max_size=3, unique_by=lambda row: row.request_id).map(kind.of)  # type: ignore[attr-defined]


@cache
def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return valid values of a type that crosses the wire."""
    if hint is Commits:
        return _frames_of(Commits, values_of(Commit))
    if hint is Drafts:
        chains = values_of(Draft)
        return st.booleans().flatmap(lambda has_rows: _frames_of(Drafts, chains.map(lambda one: _chain(one, has_rows))))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        hints, checked = typing.get_type_hints(hint), CHECKED_FIELDS.get(hint, {})
        names = [field.name for field in dataclasses.fields(hint)]
        return st.builds(hint, **{name: checked[name] if name in checked else values_of(hints[name]) for name in names})
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return st.sampled_from(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if argument is types.NoneType else values_of(argument) for argument in arguments))
    if origin in (tuple, list):
        return st.lists(values_of(arguments[0]), max_size=3).map(origin)
    if origin is dict:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    if hint is msgspec.Raw:  # an output on its way to its gateway
        return values_of(RequestOutput).map(packed)
    return SCALARS[hint]


MESSAGES = st.sampled_from(MESSAGE_TYPES).flatmap(values_of)
FRAMES = MESSAGES.map(encode)

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
PLAIN = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_ODD = st.sampled_from((None, False, 0, 1.5, 1 << 63, "", b"", (), {}))  # of every kind, one that is easily let in
Edit = Callable[[bytes, st.DataObject], bytes]


def _flip_bit(frame: bytes, data: st.DataObject) -> bytes:
    index = data.draw(st.integers(0, len(frame) * 8 - 1))
    spoilt = bytearray(frame)
    spoilt[index // 8] ^= 1 << index % 8
    return bytes(spoilt)


def _truncate(frame: bytes, data: st.DataObject) -> bytes:
    return frame[: data.draw(st.integers(0, len(frame) - 1))]


def _double(frame: bytes, data: st.DataObject) -> bytes:
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(frame)), st.integers(0, len(frame)))))
    return frame[:end] + frame[start:]


def _insert_huge_length(frame: bytes, data: st.DataObject) -> bytes:
    """Announce more items or bytes than there are, in any of msgpack's long forms."""
    header = data.draw(st.sampled_from(b"\xdd\xdf\xdb\xc6\xc9"))
    size = data.draw(st.sampled_from((len(frame), 1 << 20, (1 << 31) - 1, (1 << 32) - 1)))
    index = data.draw(st.integers(0, len(frame)))
    return frame[:index] + struct.pack(">BI", header, size) + frame[index:]


def _nest(frame: bytes, data: st.DataObject) -> bytes:
    opener = data.draw(st.sampled_from((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\xc7\x01\x05")))
    index = data.draw(st.integers(0, len(frame)))
    return frame[:index] + opener * data.draw(st.integers(1, 3000)) + frame[index:]


def replace_value(frame: bytes, data: st.DataObject) -> bytes:
    """Put an arbitrary value in the place of one field, at any depth; a frame that does not unpack stays as it is."""
    try:
        fields = msgpack.unpackb(frame)
    except (ValueError, msgpack.UnpackException):
        return frame
    node: Any = fields
    while isinstance(node, dict | list) and node:
        # a message of another type is refused before any of its fields is looked at
        keys = list(node) if isinstance(node, dict) else range(node is fields, len(node))
        if not keys:
            break
        key: Any = data.draw(st.sampled_from(keys))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            node[key] = data.draw(_ODD | PLAIN)
            break
        node = node[key]
    return msgpack.packb(fields)


EDITS: tuple[Edit, ...] = (_flip_bit, _truncate, _double, _insert_huge_length, _nest, replace_value)


@st.composite
def spoilt_frames(draw: st.DrawFn, frames: st.SearchStrategy[bytes] = FRAMES) -> bytes:
    """Draw a valid frame and spoil it one to three times."""
    frame = draw(frames)
    data = draw(st.data())
    for edit in draw(st.lists(st.sampled_from(EDITS), min_size=1, max_size=3)):
        if frame:
            frame = edit(frame, data)
    return frame
