"""The client against small servers: a floor that plays back bytes, whole ones and such as lack something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from outrider.lab.gateway.client import Ask, Found, examine, send_load
from outrider.lab.gateway.figures import Run, errors_of
from outrider.lab.gateway.floor import HOST, Sends, grpc_floor, http_floor
from outrider.lab.gateway.loads import Door, Load
from outrider.proto import generation_pb2

NUM_TOKENS = 5
SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENTS = [b'data: {"choices": [{"text": " a", "finish_reason": null}]}\n\n'] * NUM_TOKENS
DONE = b"data: [DONE]\n\n"
MESSAGES = [generation_pb2.GenerateChunk(text=" a", token_ids=[7]).SerializeToString()] * NUM_TOKENS
JSON_ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 32\r\n\r\n{"usage":{"completion_tokens":1}}'.replace(b"32", b"33")


def stream_of(events: Sequence[bytes]) -> list[bytes]:
    return [SSE_HEAD + events[0], *events[1:], DONE]


def load_of(door: Door, *, is_streamed: bool = True, num_clients: int = 3, num_rounds: int = 2) -> Load:
    num_tokens = NUM_TOKENS if is_streamed else 1
    return Load(
        door=door, is_streamed=is_streamed, num_clients=num_clients, num_rounds=num_rounds, num_tokens=num_tokens
    )


@asynccontextmanager
async def floor_of(door: Door, pieces: list[bytes]) -> AsyncIterator[int]:
    async with (http_floor if door is Door.HTTP else grpc_floor)(Sends(door=door, pieces=pieces, step_s=0.0)) as port:
        yield port


def ask_of(load: Load, port: int, max_seconds: float = 20.0) -> Ask:
    return Ask(load=load, host=HOST, port=port, model="m", max_seconds=max_seconds)


async def found_at(load: Load, pieces: list[bytes]) -> Found:
    """Return what a client finds at a server that sends these pieces."""
    async with floor_of(load.door, pieces) as port:
        return examine(load, *await send_load(ask_of(load, port)))


def wrong(load: Load, found: Found) -> list[str]:
    return errors_of(Run(load=load, found=found, spent_s={}))


@pytest.mark.parametrize(("door", "pieces"), [(Door.HTTP, stream_of(EVENTS)), (Door.GRPC, MESSAGES)])
async def test_streams_that_are_whole_have_an_event_a_token(door: Door, pieces: list[bytes]) -> None:
    load = load_of(door)
    found = await found_at(load, pieces)
    assert found.num_events == [NUM_TOKENS] * 6
    assert len(found.waits_s) == 6
    assert wrong(load, found) == []
    assert found.sample == pieces  # what a floor is told to send


@pytest.mark.parametrize(
    ("change", "span"), [(EVENTS[1:], "4 events"), ([*EVENTS, EVENTS[0]], "6 events")], ids=["fewer", "more"]
)
async def test_an_event_too_few_or_too_many_is_caught(change: list[bytes], span: str) -> None:
    load = load_of(Door.HTTP)
    assert wrong(load, await found_at(load, stream_of(change))) == [f"6 of 6 streams had {span} for 5 tokens"]


async def test_messages_that_hold_two_tokens_are_caught() -> None:
    load = load_of(Door.GRPC)
    pair = generation_pb2.GenerateChunk(text=" a a", token_ids=[7, 7]).SerializeToString()
    assert wrong(load, await found_at(load, [*MESSAGES[2:], pair])) == ["6 of 6 streams had 4 events for 5 tokens"]


@pytest.mark.parametrize(
    ("door", "pieces"),
    [
        (Door.HTTP, [JSON_ANSWER]),
        (Door.GRPC, [generation_pb2.GenerateResponse(choices=[{"token_ids": [7]}]).SerializeToString()]),
    ],
)
async def test_clients_ask_one_after_another(door: Door, pieces: list[bytes]) -> None:
    load = load_of(door, is_streamed=False, num_clients=2, num_rounds=4)
    found = await found_at(load, pieces)
    assert (len(found.waits_s), found.num_errors, found.num_events) == (8, 0, [])
    assert found.sample == pieces


async def test_an_answer_in_chunks_is_read_over_a_connection_that_stays() -> None:
    body = b'{"usage":{"completion_tokens":1}}'
    chunks = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    load = load_of(Door.HTTP, is_streamed=False)
    found = await found_at(load, [chunks])
    assert (len(found.waits_s), found.num_errors) == (6, 0)


async def test_refusals_and_streams_that_break_off_are_counted() -> None:
    load = load_of(Door.HTTP)
    refusal = await found_at(load, [b"HTTP/1.1 503 Busy\r\n\r\ncome back"])
    assert wrong(load, refusal) == ["6 of 6 failed: 503: come back"]
    assert wrong(load, await found_at(load, stream_of(EVENTS)[:-1])) == ["6 of 6 failed: the stream breaks off"]


async def test_a_server_that_is_not_there_or_answers_nothing_is_an_error() -> None:
    load = load_of(Door.HTTP, num_clients=1, num_rounds=1)
    async with await asyncio.start_server(lambda reader, writer: None, HOST, 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        late = examine(load, *await send_load(ask_of(load, port, max_seconds=0.1)))
    assert wrong(load, late) == ["1 of 1 failed: no answer within 0.1 s"]
    gone = examine(load, *await send_load(ask_of(load, port)))
    assert gone.num_errors == 1


def test_what_crosses_the_processes_comes_back_as_it_was() -> None:
    ask = ask_of(load_of(Door.GRPC), 80)
    assert Ask.from_json(ask.to_json()) == ask
    found = Found(elapsed_s=1.0, waits_s=[0.5], num_events=[5], errors=["x"], num_errors=2, sample=[b"\x00\xff"])
    assert Found.from_json(found.to_json()) == found
    sends = Sends(door=Door.HTTP, pieces=[b"\x00\xff"], step_s=0.5)
    assert Sends.from_json(sends.to_json()) == sends
