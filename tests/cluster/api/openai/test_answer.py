"""How an answer is sent: events that any client's line splitter takes, and signs of life while there are none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.cluster.api.openai.answer import PING, PING_INTERVAL_S, GenerationResponse, event_of
from outrider.cluster.api.openai.format import ShownChoice, error_object
from outrider.cluster.client.openai_client import stream_events
from outrider.cluster.common.errors import OutriderError, RequestFailed, Unavailable
from outrider.cluster.replies.reader import ReplySyntax
from support.stack import Stack

SEPARATED = "a\x85b\u2028c\u2029d日"  # Python's splitlines, and with it httpx's iter_lines, splits at each
DOORS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": SEPARATED}]},
    "/v1/responses": {"input": "a", "instructions": SEPARATED},
    "/v1/messages": {"messages": [{"role": "user", "content": SEPARATED}], "max_tokens": 64},
}
Message = dict[str, Any]


@pytest.mark.parametrize("path", DOORS)
async def test_events_are_one_line_each_to_any_splitter(path: str) -> None:
    async with Stack(SEPARATED).client() as client:
        body = {**DOORS[path], "stream": True}
        async with client.stream("POST", path, json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line]
        assert all(line.startswith(("data: ", "event: ")) for line in lines)
        payloads = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        if path == "/v1/responses":
            said = "".join(event["delta"] for event in payloads if event["type"] == "response.output_text.delta")
        elif path == "/v1/messages":
            said = "".join(event["delta"]["text"] for event in payloads if event["type"] == "content_block_delta")
        else:
            choices = [choice async for event in stream_events(client, path, body) for choice in event["choices"]]
            said = "".join(choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices)
    assert said == SEPARATED


SPOKEN = 'say "größer"\\ \n\u2028 {"text":""} 日本'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("thought", ["", "<think>größer?</think>"])
@pytest.mark.parametrize("extra", [{}, {"stream_options": {"include_usage": True}}, {"n": 2}])
async def test_events_from_a_template_are_those_that_were_made_one_by_one(
    monkeypatch: pytest.MonkeyPatch, path: str, thought: str, extra: dict[str, Any]
) -> None:
    syntax = ReplySyntax(reasoning_parser="qwen3") if thought else None
    stack = Stack(thought + SPOKEN, max_model_len=256, api={"reply_syntax": syntax})

    async def events() -> list[Any]:
        answer = await stack.post(path, {**DOORS[path], **extra, "stream": True})
        told = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
        for event in told:
            event["id"] = event["created"] = None
        return told

    fast = await events()
    monkeypatch.setattr(ShownChoice, "brings_text_alone", lambda self, chunk: False)
    slow = await events()
    assert sorted(map(json.dumps, fast)) == sorted(map(json.dumps, slow))
    assert len(fast) > 20
    if thought and path == "/v1/chat/completions":
        choices = [choice for event in fast for choice in event["choices"] if choice["index"] == 0]
        assert "".join(choice["delta"].get("reasoning", "") for choice in choices) == "größer?"
    assert [event["choices"][0]["index"] for event in fast if event["choices"]] == [
        event["choices"][0]["index"] for event in slow if event["choices"]
    ]


def test_an_event_may_have_a_name_and_says_errors_in_one_line_too() -> None:
    assert event_of({"type": "ping"}, "ping") == b'event: ping\ndata: {"type":"ping"}\n\n'
    event = event_of(error_object(RequestFailed(SEPARATED)))
    assert len(event.decode().splitlines()) == 2
    assert json.loads(event[6:])["error"]["message"] == SEPARATED


class Paced:
    """An answer whose events come after pauses, or fail."""

    id = "paced"

    def __init__(self, *steps: float | bytes | OutriderError) -> None:
        self._steps = steps

    async def unary(self) -> dict[str, Any]:
        async for _ in self.events():
            pass
        return {}

    async def events(self) -> AsyncIterator[bytes]:
        for step in self._steps:
            if isinstance(step, OutriderError):
                raise step
            if isinstance(step, bytes):
                yield step
            else:
                await asyncio.sleep(step)

    def failure(self, error: OutriderError) -> bytes:
        return f"failed: {error}".encode()


async def sent_of(answer: Paced, *, stream: bool = True, send_s: float = 0.0) -> list[Message]:
    """Return what is sent to a client, which may take its time with each message."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        await asyncio.sleep(send_s)
        sent.append(message)

    async def receive() -> Message:
        return await asyncio.get_running_loop().create_future()

    await GenerationResponse(answer, stream=stream, ping_interval_s=0.05)({"type": "http"}, receive, send)
    assert [message["type"] for message in sent].index("http.response.start") == 0
    assert [message for message in sent[1:] if not message.get("more_body")] == sent[-1:]
    return sent


def bodies(sent: list[Message]) -> list[bytes]:
    return [message["body"] for message in sent[1:] if message["body"]]


async def test_comments_come_while_a_stream_has_nothing_else() -> None:
    assert PING_INTERVAL_S < 15.0
    sent = await sent_of(Paced(0.18, b"one", 0.02, b"two", 0.12, b"three"))
    assert sent[0]["status"] == 200
    said = bodies(sent)
    assert [event for event in said if event != PING] == [b"one", b"two", b"three"]
    assert said.index(b"one") >= 2, "pings while the request is queued"
    assert said.index(b"two") == said.index(b"one") + 1
    assert said[said.index(b"two") + 1] == PING, "and where a token takes its time"


async def test_an_early_error_has_its_own_status_and_a_later_one_is_an_event() -> None:
    early = await sent_of(Paced(0.01, Unavailable("no verifier")))
    assert (early[0]["status"], len(early)) == (503, 2)
    late = await sent_of(Paced(0.08, Unavailable("no verifier")))
    assert late[0]["status"] == 200
    assert bodies(late) == [PING, b"failed: no verifier"]


async def test_a_client_that_is_slow_to_take_an_event_gets_no_ping_within_it() -> None:
    for pause_s in (0.0, 0.049, 0.06):
        said = bodies(await sent_of(Paced(pause_s, b"one", b"two", RequestFailed("lost")), send_s=0.12))
        assert [event for event in said if event != PING] == [b"one", b"two", b"failed: lost"]
    refused = await sent_of(Paced(Unavailable("no verifier")), send_s=0.12)
    assert (refused[0]["status"], len(refused)) == (503, 2)


async def test_an_object_has_no_pings() -> None:
    assert len(await sent_of(Paced(0.12, b"one"), stream=False)) == 2
