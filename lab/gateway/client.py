"""The client: a process of its own, whose time is not counted, and which reads what came only when all has come.

A line of JSON in is a load (`Ask`). Two lines come out: one as soon as the last byte has come, so that whoever measures
can read the clocks, and one with what was found (`Found`). Over HTTP it is a raw socket.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from outrider.lab.gateway.answers import (
    BadAnswer,
    message_sizes,
    num_answered,
    num_answered_by_call,
    num_token_events,
    pieces_of,
)
from outrider.lab.gateway.loads import Door, Load, Variant, grpc_request, http_request
from outrider.verifier_service.messages.link import NO_PROXY

GENERATE, GENERATE_UNARY = "/outrider.v1.Inference/Generate", "/outrider.v1.Inference/GenerateUnary"
READ_BYTES = 1 << 16
MAX_ERRORS = 3  # that are told


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A load, and where it goes."""

    load: Load
    host: str
    port: int
    model: str
    max_seconds: float

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Ask:
        values = json.loads(line)
        load = values.pop("load")
        door, variant = Door(load.pop("door")), Variant(load.pop("variant"))
        return cls(load=Load(door=door, variant=variant, **load), **values)


@dataclass(slots=True, kw_only=True)
class Found:
    """What became of a load."""

    elapsed_s: float = 0.0  # from the first byte that was sent to the last that came
    waits_s: list[float] = field(default_factory=list)  # to a stream's first token; of a request, to its answer's end
    num_events: list[int] = field(default_factory=list)  # that brought a token, of each stream
    errors: list[str] = field(default_factory=list)  # the first few
    num_errors: int = 0
    sample: list[bytes] = field(default_factory=list)  # what a server wrote for one request, piece by piece

    def to_json(self) -> str:
        sample = [base64.b64encode(piece).decode() for piece in self.sample]
        return json.dumps({**dataclasses.asdict(self), "sample": sample})

    @classmethod
    def from_json(cls, line: str) -> Found:
        values = json.loads(line)
        return cls(**{**values, "sample": [base64.b64decode(piece) for piece in values["sample"]]})


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request's: the bytes of a socket as they came, or the messages of a call."""

    parts: list[bytes] = field(default_factory=list)
    wait_s: float | None = None
    error: str | None = None


async def send_load(ask: Ask) -> tuple[list[Answer], float]:
    """Send a load; return the answers in no order, and the seconds that it took."""
    answers: list[Answer] = []
    load, begin_s = ask.load, time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        channel: grpc.aio.Channel | None = None
        if load.door is Door.GRPC:
            address, options = f"{ask.host}:{ask.port}", [NO_PROXY]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
        begin_s = time.perf_counter()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ask.max_seconds):
                await (_streams(ask, channel, answers) if load.is_streamed else _clients(ask, channel, answers))
    elapsed_s = time.perf_counter() - begin_s
    missing = load.num_requests - len(answers)
    answers += [Answer(error=f"no answer within {ask.max_seconds:g} s") for _ in range(missing)]
    return answers, elapsed_s


async def _streams(ask: Ask, channel: grpc.aio.Channel | None, answers: list[Answer]) -> None:
    async def stream(number: int) -> None:
        answers.append(await (_http_stream(ask, number) if channel is None else _grpc_stream(ask, channel, number)))

    for index in range(ask.load.num_rounds):
        first = index * ask.load.num_clients
        async with asyncio.TaskGroup() as group:
            for number in range(first, first + ask.load.num_clients):
                group.create_task(stream(number))


async def _clients(ask: Ask, channel: grpc.aio.Channel | None, answers: list[Answer]) -> None:
    async def client(index: int) -> None:
        numbers = range(index * ask.load.num_rounds, (index + 1) * ask.load.num_rounds)
        if channel is None:
            await _http_requests(ask, numbers, answers)
        else:
            for number in numbers:
                answers.append(await _grpc_request(ask, channel, number))

    async with asyncio.TaskGroup() as group:
        for index in range(ask.load.num_clients):
            group.create_task(client(index))


async def _http_stream(ask: Ask, number: int) -> Answer:
    """Stream over a connection of its own, which the server closes."""
    answer, begin_s = Answer(), time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(ask.host, ask.port)
        with contextlib.closing(writer):
            writer.write(http_request(ask.load, ask.model, number))
            while data := await reader.read(READ_BYTES):
                if answer.wait_s is None and b"data:" in data:
                    answer.wait_s = time.perf_counter() - begin_s
                answer.parts.append(data)
    except OSError as error:
        answer.error = str(error)
    return answer


async def _http_requests(ask: Ask, numbers: range, answers: list[Answer]) -> None:
    """Ask one after another over one connection."""
    try:
        reader, writer = await asyncio.open_connection(ask.host, ask.port)
        with contextlib.closing(writer):
            for number in numbers:
                begin_s = time.perf_counter()
                writer.write(http_request(ask.load, ask.model, number))
                answer = await _one_answer(reader)
                answers.append(Answer(parts=[answer], wait_s=time.perf_counter() - begin_s))
    except (OSError, EOFError) as error:
        answers.append(Answer(error=f"the connection ended: {error}"))


async def _one_answer(reader: asyncio.StreamReader) -> bytes:
    """Read an answer of a connection that stays."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = head.lower()
    if b"content-length:" in fields:
        size = int(fields.partition(b"content-length:")[2].partition(b"\r\n")[0])
        return head + await reader.readexactly(size)
    parts = [head]
    while True:
        line = await reader.readline()
        size = int(line.partition(b";")[0], 16)
        parts += [line, await reader.readexactly(size + 2)]
        if size == 0:
            return b"".join(parts)


async def _grpc_stream(ask: Ask, channel: grpc.aio.Channel, number: int) -> Answer:
    answer, begin_s = Answer(), time.perf_counter()
    try:
        async for message in channel.unary_stream(GENERATE)(grpc_request(ask.load, number)):
            if answer.wait_s is None:
                answer.wait_s = time.perf_counter() - begin_s
            answer.parts.append(message)
    except grpc.aio.AioRpcError as error:
        answer.error = f"{error.code().name}: {error.details()}"
    return answer


async def _grpc_request(ask: Ask, channel: grpc.aio.Channel, number: int) -> Answer:
    begin_s = time.perf_counter()
    try:
        message = await channel.unary_unary(GENERATE_UNARY)(grpc_request(ask.load, number))
    except grpc.aio.AioRpcError as error:
        return Answer(error=f"{error.code().name}: {error.details()}")
    return Answer(parts=[message], wait_s=time.perf_counter() - begin_s)


# --- when all has come ---


def examine(load: Load, answers: list[Answer], elapsed_s: float) -> Found:
    """Count what came, and keep the bytes of one that is whole."""
    found = Found(elapsed_s=elapsed_s)
    errors: list[str] = []
    for answer in answers:
        try:
            if answer.error is not None:
                raise BadAnswer(answer.error)
            _count(load, answer, found)
        except (BadAnswer, ValueError) as error:
            errors.append(str(error))
    found.num_errors, found.errors = len(errors), list(dict.fromkeys(errors))[:MAX_ERRORS]
    return found


def _count(load: Load, answer: Answer, found: Found) -> None:
    """Add an answer to what was found. Raises `ValueError` if it is none, or has not all its tokens."""
    raw = b"".join(answer.parts)
    is_http = load.door is Door.HTTP
    num_tokens: int | None = None  # where the answer says so
    if not load.is_streamed:
        num_tokens = num_answered(raw) if is_http else num_answered_by_call(raw)
        sample = [raw]
    elif is_http:
        found.num_events.append(num_token_events(raw))
        sample = [] if found.sample else pieces_of(raw)
    else:
        sizes = message_sizes(answer.parts)
        num_tokens, sample = sum(sizes), answer.parts
        found.num_events.append(len(sizes))
    if num_tokens not in (None, load.num_tokens):
        raise BadAnswer(f"{num_tokens} tokens, not {load.num_tokens}")
    found.sample = found.sample or sample
    if answer.wait_s is not None:
        found.waits_s.append(answer.wait_s)


def main(lines: Any = sys.stdin, out: Any = sys.stdout) -> None:
    """Send one load after another, until the input ends."""
    for line in lines:
        ask = Ask.from_json(line)
        answers, elapsed_s = asyncio.run(send_load(ask))
        out.write("\n")
        out.flush()
        out.write(examine(ask.load, answers, elapsed_s).to_json() + "\n")
        out.flush()


if __name__ == "__main__":
    main()
