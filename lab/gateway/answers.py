"""What came back, as bytes of a socket or messages of a call: its events, and those that bring a token.

Read after the clock has stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from outrider.proto import generation_pb2

_HEAD_END = b"\r\n\r\n"
_EVENT_END = re.compile(rb"(?<=\n\n\r\n)|(?<=\n\n)(?!\r\n)")  # of an event in a chunk of its own, or without chunks
MAX_ERROR_CHARS = 200


class BadAnswer(ValueError):
    """A server's answer that is no stream of events, or one that says an error."""


def body_of(answer: bytes) -> bytes:
    """Return the body of an HTTP answer, its chunks put together. Raises `BadAnswer` unless its status is 200."""
    head, _, body = answer.partition(_HEAD_END)
    status = head.partition(b"\r\n")[0].split()
    if len(status) < 2 or not status[0].startswith(b"HTTP/"):
        raise BadAnswer("no answer" if not answer else f"no HTTP: {answer[:MAX_ERROR_CHARS]!r}")
    if b"transfer-encoding: chunked" in head.lower():
        body = _unchunked(body)
    if status[1] != b"200":
        raise BadAnswer(f"{status[1].decode()}: {body[:MAX_ERROR_CHARS].decode(errors='replace')}")
    return body


def _unchunked(body: bytes) -> bytes:
    parts: list[bytes] = []
    start = 0
    while True:
        end = body.find(b"\r\n", start)
        try:
            size = int(body[start:end].partition(b";")[0], 16)
        except ValueError as error:
            raise BadAnswer("the answer breaks off") from error
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        start = end + 2 + size + 2


def num_token_events(answer: bytes) -> int:
    """Count the events of a stream that bring a token. Raises `BadAnswer`, also if it does not end with [DONE]."""
    events = body_of(answer).split(b"\n\n")
    payloads = [event.removeprefix(b"data:").strip() for event in events if event.startswith(b"data:")]
    if not payloads or payloads[-1] != b"[DONE]":
        raise BadAnswer("the stream breaks off" if payloads else "an empty stream")
    return sum(brings_token(json.loads(payload)) for payload in payloads[:-1])


def brings_token(event: dict[str, Any]) -> bool:
    """Return whether an event is a token's: not of the role, the end or the usage alone. Raises `BadAnswer`."""
    if "error" in event:
        raise BadAnswer(str(event["error"])[:MAX_ERROR_CHARS])
    return any(_has_token(choice) for choice in event.get("choices") or ())


def _has_token(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    says = choice.get("text") or any(value for name, value in delta.items() if name != "role")
    is_only_role = "role" in delta and not says
    # a token may have no text yet, but not in an event that is there to end the stream
    return bool(says) or (choice.get("finish_reason") is None and not is_only_role)


def message_sizes(messages: Sequence[bytes]) -> list[int]:
    """Return how many tokens each message of a call brings, of those that bring any."""
    sizes = (len(generation_pb2.GenerateChunk.FromString(message).token_ids) for message in messages)
    return [size for size in sizes if size]


def num_answered(answer: bytes) -> int | None:
    """Return how many tokens an HTTP answer has that is no stream; None: it does not say. Raises `BadAnswer`."""
    return (json.loads(body_of(answer)).get("usage") or {}).get("completion_tokens")


def num_answered_by_call(message: bytes) -> int:
    """Return how many tokens a call's only answer has."""
    return sum(len(choice.token_ids) for choice in generation_pb2.GenerateResponse.FromString(message).choices)


def pieces_of(answer: bytes) -> list[bytes]:
    """Cut a stream's answer into what a server writes for each event, the head with the first, the rest with the last.

    What it ends with ([DONE], and the last, empty chunk) is one piece.
    """
    pieces = [piece for piece in _EVENT_END.split(answer) if piece]
    is_event = [b"data: {" in piece for piece in pieces]
    last = max((index for index, found in enumerate(is_event) if found), default=0)
    return [*pieces[: last + 1], b"".join(pieces[last + 1 :])] if last + 1 < len(pieces) else pieces
