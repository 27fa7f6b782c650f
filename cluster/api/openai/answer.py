"""One HTTP answer: its prompts' chunks as a JSON object or a stream of events; cancelled if the client disconnects."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider.cluster.api.anthropic import errors as anthropic_errors
from outrider.cluster.api.openai.format import Format, ShownChoice, error_object, metrics_object, usage_object
from outrider.cluster.common.errors import OutriderError, Unauthenticated, mapping_of, retry_after
from outrider.cluster.gateway.choice import GatewayChunk, Usage, joined
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.request_parser import ValidRequest
from outrider.cluster.replies.reader import ReplyPart, ReplyReader

logger = logging.getLogger(__name__)

PING_INTERVAL_S = 10.0  # proxies and clients give up on a connection on which nothing comes, some after 15 s
PING = b": ping\n\n"  # a comment, which clients pass over
_SEPARATORS = {separator: f"\\u{ord(separator):04x}" for separator in "\x85\u2028\u2029"}

ResultT = TypeVar("ResultT")

MARK = uuid.uuid4().hex  # a text that no event has by chance


@dataclass(slots=True)
class Answer:
    """The answer to one HTTP request: the chunks of all its prompts."""

    gateway: Gateway
    format: Format
    created: int
    include_usage: bool
    return_token_ids: bool
    names_ids: bool = False
    requests: list[ValidRequest] = field(default_factory=list)
    reader: Callable[[], ReplyReader | None] = lambda: None  # one reader per choice
    follow: Callable[[str], None] | None = None  # of every choice: see `ShownChoice`
    id: str = ""

    def __post_init__(self) -> None:
        # not X-Request-Id: a client may send that twice, and inside the cluster an id must be unique
        self.id = self.format.id_prefix + uuid.uuid4().hex

    async def unary(self) -> dict[str, Any]:
        """Generate to the end and return the response object."""
        whole = await self.whole()
        answer: dict[str, Any] = {}
        choices = []
        shown = {index: self.shown(index) for index in whole}
        for index, chunk in whole.items():
            shown[index].take(chunk)
            choice, extra = self.format.object(shown[index], chunk, streamed=False)
            choices.append(choice)
            answer = {**extra, **answer}  # the first choice has the prompt's fields
        return {
            **self._envelope(self.format.object_name, choices),
            **answer,
            "usage": self._usage({index: chunk.usage for index, chunk in whole.items() if chunk.usage}, shown.values()),
            "metrics": metrics_object([chunk.speculation for chunk in whole.values()]),
            **self.warning_fields(),
            **_kv_fields(whole.values()),
        }

    async def events(self) -> AsyncIterator[bytes]:
        """Yield SSE events, `[DONE]` last; the first one has the warnings."""
        usages: dict[int, Usage] = {}
        extra = self.warning_fields()
        shown: dict[int, ShownChoice] = {}
        templates: dict[int, EventTemplate] = {}
        async with aclosing(self.chunks()) as chunks:  # type: ignore[type-var]
            async for index, chunk in chunks:
                if chunk.usage is not None:
                    usages[index] = chunk.usage
                choice = shown.get(index) or shown.setdefault(index, self.shown(index))
                choice.take(chunk)
                if not choice.shows(chunk):
                    continue
                if extra or not choice.brings_text_alone(chunk):
                    yield event_of({**self._chunk_object(choice, chunk), **extra})
                    extra = {}
                    continue
                template = templates.get(index) or templates.setdefault(index, self._template(choice))
                yield template.event(choice.said.content)
        if self.include_usage:
            usage = self._usage(usages, shown.values())
            yield event_of({**self._envelope(self.format.chunk_object_name, []), "usage": usage})
        yield b"data: [DONE]\n\n"

    def failure(self, error: OutriderError) -> bytes:
        """Return the event of an error in a stream that has begun."""
        return event_of(error_object(error))

    async def whole(self) -> dict[int, GatewayChunk]:
        """Generate to the end; return each choice as one chunk, by its index in the answer."""
        parts: dict[int, list[GatewayChunk]] = {}
        async with aclosing(self.chunks(whole=True)) as chunks:  # type: ignore[type-var]
            async for index, chunk in chunks:
                parts.setdefault(index, []).append(chunk)
        return {index: joined(parts[index]) for index in sorted(parts)}

    async def chunks(self, *, whole: bool = False) -> AsyncIterator[tuple[int, GatewayChunk]]:
        """Yield chunks with their choice's index in the answer: choice i of prompt p is p * n + i."""
        streams = [self.gateway.generate(request, whole=whole) for request in self.requests]
        if len(streams) == 1:
            async with aclosing(streams[0]) as own:  # type: ignore[type-var]
                async for chunk in own:
                    yield chunk.index, chunk
            return
        async with _merged(streams) as chunks:
            async for prompt_index, chunk in chunks:
                yield prompt_index * self.requests[0].n + chunk.index, chunk

    def warning_fields(self) -> dict[str, Any]:
        """Return the warnings about constraints that the grammar does not enforce, if there are any."""
        warnings = list(self.requests[0].warnings)  # the same for all prompts of a body
        return {"warnings": warnings} if warnings else {}

    def shown(self, index: int) -> ShownChoice:
        """Return the state of a choice before its first chunk."""
        request = self.requests[index // self.requests[0].n]
        codec = self.gateway.text
        return ShownChoice(
            index=index,
            request=request,
            codec=codec,
            return_token_ids=self.return_token_ids,
            names_ids=self.names_ids,
            reader=self.reader(),
            follow=self.follow,
        )

    def _envelope(self, object_name: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        model = self.requests[0].adapter or self.gateway.model.name
        return {"id": self.id, "object": object_name, "created": self.created, "model": model, "choices": choices}

    def _chunk_object(self, shown: ShownChoice, chunk: GatewayChunk) -> dict[str, Any]:
        choice, extra = self.format.object(shown, chunk, streamed=True)
        answer = {**self._envelope(self.format.chunk_object_name, [choice]), **extra}
        if self.include_usage:
            answer["usage"] = None  # as OpenAI: null on all chunks except the last
        if chunk.finish_reason is not None:
            answer["metrics"] = metrics_object([chunk.speculation])
        return answer

    def _template(self, shown: ShownChoice) -> EventTemplate:
        """Return the events of a begun choice's chunks that bring text alone."""
        marked = dataclasses.replace(shown, said=ReplyPart(content=MARK))
        chunk = GatewayChunk(request_id=self.id, index=shown.index, texts=(MARK,))
        return EventTemplate(event_of(self._chunk_object(marked, chunk)))

    def _usage(self, usages: dict[int, Usage], shown: Iterable[ShownChoice]) -> dict[str, Any]:
        num_choices = self.requests[0].n
        read = [choice.num_reasoning_tokens for choice in shown if choice.reader is not None]
        return usage_object(
            usages.values(),
            (usage for index, usage in usages.items() if index % num_choices == 0),
            num_reasoning_tokens=sum(read) if read else None,
        )


def _kv_fields(chunks: Iterable[GatewayChunk]) -> dict[str, Any]:
    """Return the params of the request that may take the prompt's KV, where it is kept."""
    kept = [chunk.kv_transfer_params for chunk in chunks if chunk.kv_transfer_params is not None]
    return {"kv_transfer_params": kept[0]} if kept else {}


class EventTemplate:
    """Events that differ in one text."""

    def __init__(self, marked: bytes) -> None:
        """`marked` is such an event, whose text is `MARK`."""
        self._before, self._after = marked.split(_json(MARK).encode())

    def event(self, text: str) -> bytes:
        return b"".join((self._before, _json(text).encode(), self._after))


def event_of(message: dict[str, Any], name: str | None = None) -> bytes:
    """Return a message as a server-sent event, which may have a name."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {_json(message)}\n\n".encode()


def _json(message: object) -> str:
    """Return JSON in one line: Unicode's line separators are escaped, since many clients split lines there, too."""
    data = json.dumps(message, ensure_ascii=False, separators=(",", ":"))
    if not data.isascii():
        for separator, escaped in _SEPARATORS.items():
            data = data.replace(separator, escaped)
    return data


def error_response(error: OutriderError, path: str = "") -> JSONResponse:
    """Render an error with its status and, if known, Retry-After, in the form of the API at `path`."""
    headers = {}
    if (seconds := retry_after(error)) is not None:
        headers["Retry-After"] = seconds
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    render = anthropic_errors.error_object if anthropic_errors.is_messages_path(path) else error_object
    return JSONResponse(render(error), status_code=mapping_of(error).http_status, headers=headers)


class Sent(Protocol):
    """An answer that can be sent as one object or as a stream of events."""

    @property
    def id(self) -> str: ...

    async def unary(self) -> dict[str, Any]: ...

    def events(self) -> AsyncIterator[bytes]: ...

    def failure(self, error: OutriderError) -> bytes: ...


class GenerationResponse(Response):
    """Generate an answer while sending it; cancel it if the client disconnects.

    The status line waits for the first event, so that an early error has its own status in a stream too; but no longer
    than `ping_interval_s`. From then on, comments come while there is nothing else.
    """

    def __init__(self, answer: Sent, *, stream: bool, ping_interval_s: float = PING_INTERVAL_S) -> None:
        super().__init__()
        self._answer = answer
        self._stream = stream
        self._ping_interval_s = ping_interval_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self._stream:
                sender = EventSender(send, self._ping_interval_s)
                await _unless_disconnected(receive, self._send_events(sender, scope, receive, send), sender)
            else:
                await _unless_disconnected(receive, self._send_object(scope, receive, send))
        except ClientDisconnected:
            logger.info("client of %s disconnected", self._answer.id)

    async def _send_object(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = JSONResponse(await self._answer.unary())
        except OutriderError as error:
            response = error_response(error, scope.get("path", ""))
        await response(scope, receive, send)

    async def _send_events(self, sender: EventSender, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._answer.events()) as events:  # type: ignore[type-var]
            try:
                async for event in events:
                    await sender.send(event)
            except OutriderError as error:
                if sender.end_unbegun():
                    await error_response(error, scope.get("path", ""))(scope, receive, send)
                    return
                await sender.send(self._answer.failure(error))
        await sender.end()


class EventSender:
    """Sends a stream's events; the first of them, or a ping, begins the response."""

    def __init__(self, send: Send, ping_interval_s: float) -> None:
        self._send = send
        self._ping_interval_s = ping_interval_s
        self._sent_s = time.monotonic()  # when the last event was, or the call arrived
        self._has_begun = self._has_ended = False
        self._sending = asyncio.Lock()  # pings come from another task

    @property
    def silence_s(self) -> float | None:
        """How long there may yet be silence; None: the response ends, and needs no ping."""
        return None if self._has_ended else max(0.0, self._sent_s + self._ping_interval_s - time.monotonic())

    async def send(self, event: bytes) -> None:
        """Send an event."""
        async with self._sending:
            if not self._has_begun:
                self._has_begun = True
                await self._send(_start_message())
            await self._send({"type": "http.response.body", "body": event, "more_body": True})
            self._sent_s = time.monotonic()

    async def ping_if_silent(self) -> None:
        """Send a comment if there has been silence for too long; not while an event waits for a slow client."""
        if self.silence_s != 0.0:
            return
        if self._sending.locked():
            self._sent_s = time.monotonic()
        else:
            await self.send(PING)

    def end_unbegun(self) -> bool:
        """End a stream of which nothing was sent, for another response; return whether it was one."""
        self._has_ended = not self._has_begun
        return self._has_ended

    async def end(self) -> None:
        """End the response."""
        self._has_ended = True
        async with self._sending:
            if not self._has_begun:
                await self._send(_start_message())
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})


def _start_message() -> dict[str, Any]:
    headers = {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        "x-accel-buffering": "no",  # a buffering proxy would defeat streaming
    }
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


class ClientDisconnected(Exception):
    """The client disconnected before its answer was complete."""


async def _unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, ResultT], sender: EventSender | None = None
) -> ResultT:
    """Run `work`; if the client disconnects, cancel it and raise `ClientDisconnected`. Meanwhile, `sender` pings."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        while not (task.done() or watcher.done()):
            silence_s = None if sender is None else sender.silence_s
            await asyncio.wait((task, watcher), timeout=silence_s, return_when=asyncio.FIRST_COMPLETED)
            if sender is not None and not (task.done() or watcher.done()):
                await sender.ping_if_silent()
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for part in (task, watcher):
            part.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def _merged(
    streams: Sequence[AsyncIterator[GatewayChunk]],
) -> AsyncIterator[AsyncIterator[tuple[int, GatewayChunk]]]:
    """Merge the prompts' streams as chunks arrive; on exit, all of them are closed."""
    # size 1: a slow client's chunks wait in its generation, which joins them
    queue: asyncio.Queue[tuple[int, GatewayChunk | Exception | None]] = asyncio.Queue(maxsize=1)
    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(_pump(index, stream, queue)) for index, stream in enumerate(streams)]
        stack.push_async_callback(_cancel_all, tasks)
        yield _drain(queue, num_streams=len(streams))


async def _pump(
    index: int, stream: AsyncIterator[GatewayChunk], queue: asyncio.Queue[tuple[int, GatewayChunk | Exception | None]]
) -> None:
    try:
        async with aclosing(stream):  # type: ignore[type-var]
            async for chunk in stream:
                await queue.put((index, chunk))
        await queue.put((index, None))
    except Exception as error:  # raised again by `_drain`, at the consumer
        await queue.put((index, error))


async def _drain(
    queue: asyncio.Queue[tuple[int, GatewayChunk | Exception | None]], num_streams: int
) -> AsyncIterator[tuple[int, GatewayChunk]]:
    while num_streams:
        index, item = await queue.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            num_streams -= 1
        else:
            yield index, item


async def _cancel_all(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
