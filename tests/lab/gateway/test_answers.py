"""Events, and those that bring a token."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.lab.gateway.answers import (
    BadAnswer,
    brings_token,
    message_sizes,
    num_answered,
    num_answered_by_call,
    num_token_events,
    pieces_of,
)
from outrider.proto import generation_pb2

TOKEN: dict[str, Any] = {"choices": [{"index": 0, "text": ' said "data: {"', "finish_reason": None}]}
LAST: dict[str, Any] = {"choices": [{"index": 0, "text": "!", "finish_reason": "length"}]}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def event(value: dict[str, Any] | str) -> bytes:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def chunked(*events: bytes) -> bytes:
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"".join(map(chunk, events)) + b"0\r\n\r\n"


def whole(*events: bytes) -> bytes:
    return HEAD + b"\r\n" + b"".join(events)


EVENTS = (event(TOKEN), event(TOKEN), event(LAST), event("[DONE]"))


@pytest.mark.parametrize("frame", [chunked, whole])
def test_events_with_a_token_are_counted(frame: Any) -> None:
    assert num_token_events(frame(b": ping\n\n", *EVENTS)) == 3
    usage = event({"choices": [], "usage": {"completion_tokens": 3}})
    assert num_token_events(frame(*EVENTS[:3], usage, EVENTS[3])) == 3


@pytest.mark.parametrize(
    ("choice", "is_token"),
    [
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": "a"}, "finish_reason": None}, True),
        ({"delta": {"content": "a"}, "finish_reason": "length"}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
        ({"delta": {"tool_calls": [{"index": 0}]}, "finish_reason": None}, True),
        ({"text": "", "finish_reason": None}, True),  # a part of a character
        ({"text": "", "finish_reason": "stop"}, False),
    ],
)
def test_an_event_is_a_tokens_or_not(choice: dict[str, Any], is_token: bool) -> None:
    assert brings_token({"choices": [choice]}) is is_token


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "no answer"),
        (b"hello", "no HTTP"),
        (b"HTTP/1.1 429 Too Many\r\n\r\nlater", "429: later"),
        (whole(*EVENTS[:3]), "breaks off"),
        (chunked(*EVENTS)[:-20], "breaks off"),
        (whole(), "empty"),
        (whole(event({"error": {"message": "lost"}}), EVENTS[3]), "lost"),
    ],
)
def test_what_is_no_stream_is_an_error(answer: bytes, words: str) -> None:
    with pytest.raises(BadAnswer, match=words):
        num_token_events(answer)


@pytest.mark.parametrize("frame", [chunked, whole])
def test_a_server_writes_a_piece_for_each_event_and_one_for_the_end(frame: Any) -> None:
    answer = frame(*EVENTS)
    pieces = pieces_of(answer)
    assert b"".join(pieces) == answer
    assert [piece.count(b"data: {") for piece in pieces] == [2, 2, 1, 0]  # one is in the text
    assert pieces[0].startswith(b"HTTP/1.1")
    assert b"[DONE]" in pieces[-1]


def test_an_answer_that_is_no_stream_says_its_tokens() -> None:
    assert num_answered(whole(json.dumps({"usage": {"completion_tokens": 2}}).encode())) == 2
    assert num_answered(whole(b"{}")) is None
    choices = [generation_pb2.Choice(token_ids=[1, 2])]
    assert num_answered_by_call(generation_pb2.GenerateResponse(choices=choices).SerializeToString()) == 2


def test_the_messages_of_a_call_are_counted_by_their_tokens() -> None:
    messages = [generation_pb2.GenerateChunk(token_ids=ids).SerializeToString() for ids in ([1], [2, 3], [])]
    assert message_sizes(messages) == [1, 2]
