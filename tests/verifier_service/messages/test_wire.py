"""Every message survives the wire; whatever is not a message is refused by the name of its field."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.verifier_service.messages import engine as engine_messages
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, Open, Resync, SparseRow
from outrider.verifier_service.messages.request import (
    DisabledReason,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
    SpeculationPlan,
)
from outrider.verifier_service.messages.wire import MAX_FRAME_BYTES, RequestHead, WireError, decode, encode, head_of

INT64_MAX = (1 << 63) - 1
INT64_MIN = -(1 << 63)


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    """One field of every kind that may cross."""

    number: int
    ratio: float
    text: str
    flag: bool
    blob: bytes
    colour: Colour
    maybe: int | None = None
    texts: tuple[str, ...] = ()
    table: list[list[int]] = field(default_factory=list)
    by_name: dict[str, Close] = field(default_factory=dict)
    colours: tuple[Colour, ...] = ()
    maybe_rows: tuple[SparseRow, ...] | None = None


EVERYTHING = Everything(
    number=-7,
    ratio=0.25,
    text="é",
    flag=True,
    blob=b"\xff\x00",
    colour=Colour.RED,
    maybe=0,
    texts=("", "a"),
    table=[[1, 2], []],
    by_name={"x": Close(request_id="r")},
    colours=(Colour.RED, Colour.RED),
    maybe_rows=(SparseRow(token_ids=(1, 2), weights=(3, 4)),),
)
COMMIT = Commit(request_id="r", round_id=1, position=2, token_ids=(3, 4), max_length=5)
BATCH = ScheduledBatch(
    token_ids=[1, 2],
    positions=[0, 1],
    slot_mapping=[16, 17],
    query_lengths=[2],
    context_lengths=[2],
    block_tables=[[1]],
    logits_indices=[1],
    copy_sources=[0],
    copy_targets=[1],
)
ROWS = (SparseRow(token_ids=(7, 8), weights=(65000, 536)), SparseRow(token_ids=(9,), weights=(65536,)))
SAMPLING = SamplingParams(temperature=0.5, seed=INT64_MIN, stop_token_ids=(1,), num_speculative_tokens=0)
MESSAGES = [
    EVERYTHING,
    COMMIT,
    BATCH,
    Commit(request_id="", round_id=INT64_MAX, position=0, token_ids=(), max_length=0),
    Open(request_id="r", sampling=DraftSampling(temperature=0.0), token_ids=(INT64_MIN, 0, INT64_MAX)),
    Open(request_id="r", sampling=DraftSampling(temperature=1.0, seed=-1, choice_index=2), token_ids=(1,)),
    Close(request_id="r"),
    Draft(request_id="r", round_id=1, position=2, token_ids=(7, 9), draft_probs=ROWS),
    Draft(request_id="r", round_id=1, position=2, token_ids=()),
    Resync(request_id="r"),
    GenerationRequest(request_id="r", prompt_token_ids=(1, 2)),
    GenerationRequest(
        request_id="r",
        prompt_token_ids=(1,),
        sampling=SAMPLING,
        plan=SpeculationPlan(drafter_id="d", draft_length=3, disabled_reason=DisabledReason.LOAD),
    ),
    RequestOutput(request_id="r", token_ids=(1,)),
    RequestOutput(
        request_id="r",
        token_ids=(),
        finish_reason=FinishReason.STOP,
        error="no",
        speculation=SpeculationMetrics(enabled=True, num_drafts=1, num_accepted_per_position=[1, 0]),
    ),
    SAMPLING,
]
TYPES = tuple({type(message) for message in MESSAGES} | {*engine_messages.TO_ENGINE, *engine_messages.FROM_ENGINE})


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: Any) -> None:
    decoded = decode(encode(message), TYPES)
    assert decoded == message
    assert type(decoded) is type(message)


def test_a_sequence_keeps_its_declared_kind() -> None:
    decoded = decode(encode(EVERYTHING), TYPES)
    assert type(decoded.texts) is tuple
    assert type(decoded.table) is list
    assert type(decoded.table[0]) is list
    assert type(decoded.by_name["x"]) is Close


def test_defaults_fill_absent_fields() -> None:
    assert decode(_frame("Draft", request_id="r", round_id=1, position=0, token_ids=[]), TYPES).draft_probs is None


def test_a_drafter_is_told_the_temperature() -> None:
    with pytest.raises(WireError, match="missing required field `temperature`"):
        decode(_frame("Open", request_id="r", sampling={"top_k": 3}, token_ids=[1]), TYPES)


def test_an_int_is_a_float_on_arrival() -> None:
    ratio = decode(_frame_of(EVERYTHING, ratio=2), TYPES).ratio
    assert type(ratio) is float
    assert ratio == 2.0


def _frame(name: str, **fields: Any) -> bytes:
    return msgpack.packb([name, fields])


def _frame_of(message: Any, **changes: Any) -> bytes:
    name, fields = msgpack.unpackb(encode(message))
    return msgpack.packb([name, {**fields, **changes}])


def _nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"round_id": "1"}, "Commit: Expected `int`, got `str` - at `$.round_id`"),
        ({"round_id": True}, "Commit: Expected `int`, got `bool` - at `$.round_id`"),
        ({"round_id": 1.0}, "Commit: Expected `int`, got `float` - at `$.round_id`"),
        ({"round_id": None}, "Commit: Expected `int`, got `None` - at `$.round_id`"),
        ({"request_id": b"r"}, "Commit: Expected `str`, got `bytes` - at `$.request_id`"),
        ({"token_ids": 3}, "Commit: Expected `array`, got `int` - at `$.token_ids`"),
        ({"token_ids": {}}, "Commit: Expected `array`, got `object` - at `$.token_ids`"),
        ({"token_ids": [1, True]}, "Commit: Expected `int`, got `bool` - at `$.token_ids[1]`"),
        ({"token_ids": [1, 2, "3"]}, "Commit: Expected `int`, got `str` - at `$.token_ids[2]`"),
        ({"token_ids": [[1]]}, "Commit: Expected `int`, got `array` - at `$.token_ids[0]`"),
    ],
)
def test_a_bad_field_of_a_commit_is_named(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WireError) as refusal:
        decode(_frame_of(COMMIT, **changes), TYPES)
    assert str(refusal.value) == complaint


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"flag": 1}, "Expected `bool`, got `int` - at `$.flag`"),
        ({"ratio": False}, "Expected `float`, got `bool` - at `$.ratio`"),
        ({"blob": "text"}, "Expected `bytes`, got `str` - at `$.blob`"),
        ({"colour": "blue"}, "Invalid enum value 'blue' - at `$.colour`"),
        ({"colour": ["red"]}, "Expected `str`, got `array` - at `$.colour`"),
        ({"colours": ["red", None]}, "Expected `str`, got `None` - at `$.colours[1]`"),
        ({"table": [[1], [2, None]]}, "Expected `int`, got `None` - at `$.table[1][1]`"),
        ({"table": [[1], 2]}, "Expected `array`, got `int` - at `$.table[1]`"),
        ({"by_name": []}, "Expected `object`, got `array` - at `$.by_name`"),
        ({"by_name": {"x": {}}}, "Object missing required field `request_id` - at `$.by_name[...]`"),
        ({"by_name": {b"x": {}}}, "Expected `str`, got `bytes` - at `key` in `$.by_name`"),
        ({"maybe_rows": [{"token_ids": []}]}, "Object missing required field `weights` - at `$.maybe_rows[0]`"),
        ({"maybe_rows": [3]}, "Expected `object`, got `int` - at `$.maybe_rows[0]`"),
    ],
)
def test_a_bad_nested_field_is_named_by_its_whole_path(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(WireError) as refusal:
        decode(_frame_of(EVERYTHING, **changes), TYPES)
    assert str(refusal.value) == f"Everything: {complaint}"


def test_what_a_newer_peer_says_besides_is_passed_over() -> None:
    assert decode(_frame_of(COMMIT, extra=1), TYPES) == COMMIT


@pytest.mark.parametrize("name", ["request_id", "round_id", "position", "token_ids", "max_length"])
def test_a_missing_field_is_named(name: str) -> None:
    _, fields = msgpack.unpackb(encode(COMMIT))
    del fields[name]
    with pytest.raises(WireError, match=rf"^Commit: Object missing required field `{name}`$"):
        decode(_frame("Commit", **fields), TYPES)


def test_the_dataclass_has_the_last_word() -> None:
    with pytest.raises(WireError, match=r"^SamplingParams: top_p must be in \(0, 1\]$"):
        decode(_frame_of(SAMPLING, top_p=0.0), TYPES)
    with pytest.raises(WireError, match=r"^SamplingParams: temperature"):
        decode(_frame_of(SAMPLING, temperature=float("nan")), TYPES)


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "no message: .*truncated"),
        (b"\xc1", "no message: .*malformed"),
        (encode(COMMIT) + b"\x00", "no message: .*trailing"),
        (encode(COMMIT)[:-1], "no message: .*truncated"),
        (b"\x92\xa2\xff\xfe\x80", "no message: .*utf-8"),  # text that is not UTF-8
        (b"\x92\xa6Commit\x81\xaarequest_id\xa1\xff", "Commit: .*utf-8"),
        (b"\x92\xa6Commit\x81\x01\x02", "Commit: .*key"),  # a key that is no string
        (b"\x92\xa6Commit" + b"\x91" * 5000 + b"\xc0", "no message: .*recursion"),
        (b"\x91" * 5000, "no message"),
        (msgpack.packb([1]), "no message"),
        (msgpack.packb({}), "no message: Expected `array`, got `object`"),
        (_frame("Nobody"), "unexpected message type 'Nobody'"),
        (msgpack.packb([["Commit"], {}]), "no message: Expected `str`, got `array`"),
        (msgpack.packb([_nested(400), {}]), "no message: Expected `str`, got `array`"),
    ],
)
def test_what_is_no_message_is_refused(payload: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        decode(payload, TYPES)


def test_only_the_expected_types_are_decoded() -> None:
    with pytest.raises(WireError, match=r"unexpected message type 'Commit'; expected one of \['Close', 'Open'\]"):
        decode(encode(COMMIT), [Open, Close])


def test_a_frame_beyond_the_limit_is_refused_unread() -> None:
    with pytest.raises(WireError, match="exceeds the limit"):
        decode(bytes(MAX_FRAME_BYTES + 1), TYPES)


SCALARS = (
    st.none() | st.booleans() | st.integers(INT64_MIN, (1 << 64) - 1) | st.floats() | st.text() | st.binary(max_size=20)
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text() | st.binary(max_size=4), inner, max_size=4),
    max_leaves=12,
)
FIELD_NAMES = sorted({name for message_type in TYPES for name in message_type.__dataclass_fields__})


def _decodes_or_is_refused(payload: bytes) -> None:
    try:
        message = decode(payload, TYPES)
    except WireError:
        return
    assert type(message) in TYPES
    encode(message)


@given(st.binary(max_size=200))
def test_fuzz_arbitrary_bytes(payload: bytes) -> None:
    _decodes_or_is_refused(payload)


@given(PLAIN)
def test_fuzz_arbitrary_values(value: Any) -> None:
    _decodes_or_is_refused(msgpack.packb(value))


@settings(max_examples=300)
@given(
    st.sampled_from(sorted(message_type.__name__ for message_type in TYPES)),
    st.dictionaries(st.sampled_from(FIELD_NAMES), PLAIN, max_size=6),
)
def test_fuzz_arbitrary_fields(name: str, fields: dict[str, Any]) -> None:
    _decodes_or_is_refused(_frame(name, **fields))


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES), st.data())
def test_fuzz_one_wrong_field_of_a_right_message(message: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(type(message).__dataclass_fields__)))
    _decodes_or_is_refused(_frame_of(message, **{name: data.draw(PLAIN)}))


@settings(max_examples=200)
@given(st.sampled_from(MESSAGES), st.data())
def test_fuzz_one_flipped_byte(message: Any, data: st.DataObject) -> None:
    payload = bytearray(encode(message))
    index = data.draw(st.integers(0, len(payload) - 1))
    payload[index] = data.draw(st.integers(0, 255))
    _decodes_or_is_refused(bytes(payload))


def test_the_head_of_a_request_is_read_whatever_else_is_wrong():
    frame = encode(GenerationRequest(request_id="a", prompt_token_ids=(1,), most_waiting=7))
    assert head_of(frame, GenerationRequest) == RequestHead(request_id="a", most_waiting=7)
    assert head_of(frame.replace(b"prompt_", b"prompT_"), GenerationRequest).request_id == "a"
    assert head_of(frame.replace(b"most_waiting\x07", b"most_waiting\xc3"), GenerationRequest).request_id == "a"
    for payload, named in (
        (frame.replace(b"request_id", b"rEquest_id"), "request_id"),
        (encode(Close(request_id="a")), "Close"),
        (frame[:-1], "truncated"),
        (b"\x00" * (MAX_FRAME_BYTES + 1), "exceeds the limit"),
    ):
        with pytest.raises(WireError, match=named):
            head_of(payload, GenerationRequest)
