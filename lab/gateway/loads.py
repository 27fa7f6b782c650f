"""What is asked of a server: so many streams that come at once, or so many clients that ask one after another.

Pure: the client that sends it and the server that is measured are elsewhere.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.proto import generation_pb2

MOST_TOKENS = 1 << 16  # of a load: streams that are many have fewer each
FEWEST_TOKENS = 1024  # of a load: streams that are few come again and again
VARIANT_STREAMS = 64  # with which variants are compared
MAX_STREAMS, MAX_TOKENS = 4096, 8192
LOGPROBS = 5  # alternatives
NUM_TOOLS = 8
PROMPT = "Step {}: what does the function return?"


class Door(enum.StrEnum):
    HTTP = "http"
    GRPC = "grpc"


class Variant(enum.StrEnum):
    """What a request asks for besides its text."""

    PLAIN = "plain"
    LOGPROBS = "log probabilities"
    USAGE = "usage"
    CHAT = "chat"
    TOOLS = "chat with tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`num_clients` at a time; each asks `num_rounds` times for `num_tokens` tokens.

    Streams: all come at once, each over a connection of its own; a round begins when the last one of the round before
    has ended. Else each client asks for answers that are not streamed, the next one when it has one.
    """

    door: Door
    is_streamed: bool
    num_clients: int
    num_rounds: int
    num_tokens: int
    variant: Variant = Variant.PLAIN

    @property
    def num_requests(self) -> int:
        return self.num_clients * self.num_rounds

    @property
    def num_units(self) -> int:
        """What the costs are divided by: tokens of streams, else requests."""
        return self.num_requests * self.num_tokens if self.is_streamed else self.num_requests

    @property
    def name(self) -> str:
        kind = "streams" if self.is_streamed else "clients"
        variant = "" if self.variant is Variant.PLAIN else f", {self.variant}"
        return f"{self.door}, {self.num_clients} {kind}{variant}"


def streams(door: Door, num_streams: int, num_tokens: int, variant: Variant = Variant.PLAIN) -> Load:
    """Return a load of streams; many of them have fewer tokens each, few of them come in several rounds."""
    num_tokens = min(num_tokens, max(1, MOST_TOKENS // num_streams))
    return Load(
        door=door,
        is_streamed=True,
        num_clients=num_streams,
        num_rounds=math.ceil(FEWEST_TOKENS / (num_streams * num_tokens)),
        num_tokens=num_tokens,
        variant=variant,
    )


def requests(door: Door, num_clients: int, num_requests: int) -> Load:
    """Return a load of one-token requests, `num_requests` or a few more."""
    return Load(
        door=door,
        is_streamed=False,
        num_clients=num_clients,
        num_rounds=math.ceil(num_requests / num_clients),
        num_tokens=1,
    )


def all_loads(
    doors: Sequence[Door],
    *,
    num_streams: Sequence[int],
    num_tokens: int,
    num_clients: Sequence[int],
    num_requests: int,
    has_variants: bool,
) -> list[Load]:
    """Return all that is measured: streams, then variants, then requests. Raises `ValueError` naming the option."""
    for name, values, most in (("streams", num_streams, MAX_STREAMS), ("clients", num_clients, MAX_STREAMS)):
        if any(not 1 <= value <= most for value in values):
            raise ValueError(f"{name} must be numbers from 1 to {most}")
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"tokens must be from 1 to {MAX_TOKENS}")
    if num_requests < 1:
        raise ValueError("requests must be at least 1")
    loads = [streams(door, number, num_tokens) for door in doors for number in num_streams]
    if has_variants:
        loads += [
            streams(door, VARIANT_STREAMS, num_tokens, variant)
            for door in doors
            for variant in (list(Variant)[1:] if door is Door.HTTP else [Variant.LOGPROBS])
        ]
    return loads + [requests(door, number, num_requests) for door in doors for number in num_clients]


# --- what is sent ---


def http_request(load: Load, model: str, number: int) -> bytes:
    """Return a request of HTTP/1.1; a stream's connection ends with it."""
    is_chat = load.variant in (Variant.CHAT, Variant.TOOLS)
    prompt = PROMPT.format(number)
    body: dict[str, Any] = {"model": model, "max_tokens": load.num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    if load.is_streamed:
        body["stream"] = True
    match load.variant:
        case Variant.LOGPROBS:
            body["logprobs"] = LOGPROBS
        case Variant.USAGE:
            body["stream_options"] = {"include_usage": True}
        case Variant.TOOLS:
            body["tools"] = [_tool(index) for index in range(NUM_TOOLS)]
    data = json.dumps(body).encode()
    lines = [
        f"POST /v1/{'chat/completions' if is_chat else 'completions'} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        f"Connection: {'close' if load.is_streamed else 'keep-alive'}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def grpc_request(load: Load, number: int) -> bytes:
    """Return a `GenerateRequest`, encoded."""
    sampling = generation_pb2.SamplingParams(temperature=0, max_tokens=load.num_tokens, ignore_eos=True)
    if load.variant is Variant.LOGPROBS:
        sampling.logprobs = LOGPROBS
    return generation_pb2.GenerateRequest(text=PROMPT.format(number), sampling=sampling).SerializeToString()


def _tool(index: int) -> dict[str, Any]:
    fields = {name: {"type": "string", "description": f"The {name} to look at."} for name in ("path", "pattern")}
    parameters = {"type": "object", "properties": fields, "required": ["path"]}
    description = "Find the lines of a file that match a pattern, and return them with their numbers."
    function = {"name": f"find_{index}", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
