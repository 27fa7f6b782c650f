"""/v1/responses, answer side: a chat's answer becomes output items, as one object or as events.

Events of a stream: an item or a content part is added, grows by deltas, is done; at last the response is completed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from outrider.cluster.api.openai.answer import Answer, event_of
from outrider.cluster.api.openai.format import (
    ChatFormat,
    ShownChoice,
    call_object,
    error_object,
    metrics_object,
    usage_object,
)
from outrider.cluster.api.openai.response_store import Responses, id_of_item
from outrider.cluster.api.openai.responses_protocol import Message, ResponsesBody, in_own_name
from outrider.cluster.common.errors import OutriderError
from outrider.cluster.gateway.choice import GatewayChunk
from outrider.cluster.replies.reader import ReplyPart
from outrider.cluster.replies.tools import ToolCall
from outrider.verifier_service.messages.request import FinishReason

Event = dict[str, Any]
_TEXT, _THOUGHT = "output_text", "reasoning_text"


class ResponsesFormat(ChatFormat):
    """A chat's format under the ids of responses, which are rendered here."""

    def __init__(self, id_prefix: str) -> None:
        self.id_prefix = id_prefix


class OutputItems:
    """A response's growing output: reasoning, text and calls, in the order of generation."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item's growing part; of a call, the item

    def add(self, said: ReplyPart) -> Iterator[Event]:
        """Add a part of the answer; yield its events."""
        more = [call for call in said.calls[:1] if not call.name]  # arguments of the open call
        for call in more:
            yield self._grown(call.arguments)
        if said.reasoning:
            yield from self._text(_THOUGHT, said.reasoning)
        if said.content:
            yield from self._text(_TEXT, said.content)
        for call in said.calls[len(more) :]:
            yield from self.close()
            yield from self._call(call)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """End the open item."""
        if self._open is None:
            return
        part, self._open = self._open, None
        item = self.items[-1]
        item["status"] = status
        if part is item:
            whole = {"name": item["name"], "arguments": item["arguments"]}
            yield {"type": "response.function_call_arguments.done", **self._item_place(), **whole}
        else:
            yield {"type": f"response.{part['type']}.done", **self._place(), "text": part["text"]}
            yield {"type": "response.content_part.done", **self._place(), "part": dict(part)}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": dict(item)}

    def message(self) -> Message:
        """Return the output as the chat's next message: without reasoning, and without an incomplete call."""
        texts = [part["text"] for item in self.items if item["type"] == "message" for part in item["content"]]
        message: Message = {"role": "assistant", "content": "".join(texts)}
        calls = [item for item in self.items if item["type"] == "function_call" and item["status"] == "completed"]
        if calls:
            message["tool_calls"] = [
                call_object(ToolCall(name=item["name"], arguments=item["arguments"], id=item["call_id"]))
                for item in calls
            ]
        return message

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._open is None or self._open["type"] != kind:
            yield from self.close()
            yield from self._begin(kind)
        assert self._open is not None
        self._open["text"] += text
        extra: dict[str, Any] = {"logprobs": []} if kind == _TEXT else {}
        yield {"type": f"response.{kind}.delta", **self._place(), "delta": text, **extra}

    def _begin(self, kind: str) -> Iterator[Event]:
        item: dict[str, Any]
        if kind == _TEXT:
            self._open = {"type": _TEXT, "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": self._new_id("msg"), "role": "assistant"}
        else:
            self._open = {"type": _THOUGHT, "text": ""}
            item = {"type": "reasoning", "id": self._new_id("rs"), "summary": []}
        item |= {"status": "in_progress", "content": []}
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        item["content"] = [self._open]
        yield {"type": "response.content_part.added", **self._place(), "part": dict(self._open)}

    def _call(self, call: ToolCall) -> Iterator[Event]:
        item = {
            "type": "function_call",
            "id": self._new_id("fc"),
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
            "status": "in_progress",
        }
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}
        self._open = item
        yield self._grown(call.arguments)

    def _grown(self, arguments: str) -> Event:
        """Append to the open call's arguments."""
        assert self._open is not None
        self._open["arguments"] += arguments
        return {"type": "response.function_call_arguments.delta", **self._item_place(), "delta": arguments}

    def _new_id(self, kind: str) -> str:
        return id_of_item(kind, self._response_id, len(self.items))

    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}


@dataclass(slots=True, kw_only=True)
class ResponsesAnswer:
    """The answer to one call of /v1/responses."""

    answer: Answer  # of the chat
    body: ResponsesBody
    messages: Sequence[Message]  # the chat before the answer, without instructions
    store: Responses
    output: OutputItems = field(init=False)
    num_events: int = 0

    def __post_init__(self) -> None:
        self.output = OutputItems(self.id)

    @property
    def id(self) -> str:
        """The id of the response and of its generation."""
        return self.answer.id

    async def unary(self) -> dict[str, Any]:
        """Generate to the end and return the response."""
        last: dict[str, Any] = {}
        async with aclosing(self._steps(whole=True)) as steps:  # type: ignore[type-var]
            async for step in steps:
                last = step
        response: dict[str, Any] = last["response"]
        return response

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events."""
        async with aclosing(self._steps()) as steps:  # type: ignore[type-var]
            async for step in steps:
                yield self._event(step)

    def failure(self, error: OutriderError) -> bytes:
        """Return the event of an error in a stream that has begun."""
        failed = self._response("failed") | {"error": error_object(error)["error"]}
        return self._event({"type": "response.failed", "response": failed})

    def _event(self, step: Event) -> bytes:
        number, self.num_events = self.num_events, self.num_events + 1
        return event_of({"type": step["type"], "sequence_number": number, **step}, step["type"])

    async def _steps(self, *, whole: bool = False) -> AsyncIterator[Event]:
        """Yield the events; the last one has the whole response, which is stored unless the client forbids it."""
        shown = self.answer.shown(0)
        last: GatewayChunk | None = None
        async with aclosing(self.answer.chunks(whole=whole)) as chunks:  # type: ignore[type-var]
            async for _, chunk in chunks:
                if last is None:  # not before the first chunk: an early error has its own status
                    for kind in ("response.created", "response.in_progress"):
                        yield {"type": kind, "response": self._response("in_progress")}
                last = chunk
                shown.take(chunk)
                for event in self.output.add(shown.said):
                    yield event
        assert last is not None
        is_whole = last.finish_reason is FinishReason.STOP
        for event in self.output.close("completed" if is_whole and not shown.is_within_call else "incomplete"):
            yield event
        response = self._response("completed" if is_whole else "incomplete") | _ending(last, shown)
        if self.body.store is not False:
            self.store.put(response, [*self.messages, self.output.message()])
        yield {"type": f"response.{response['status']}", "response": response}

    def _response(self, status: str) -> dict[str, Any]:
        body, sampling = self.body, self.answer.requests[0].sampling
        warnings = [in_own_name(warning) for warning in self.answer.requests[0].warnings]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.answer.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self.answer.gateway.model.name,
            "output": [dict(item) for item in self.output.items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
            "store": body.store is not False,
            "temperature": sampling.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            **({"warnings": warnings} if warnings else {}),
        }


def _ending(last: GatewayChunk, shown: ShownChoice) -> dict[str, Any]:
    """Return the fields that are known at the end of the answer."""
    assert last.usage is not None
    usage = usage_object([last.usage], [last.usage])
    reasons = {FinishReason.STOP: None, FinishReason.LENGTH: {"reason": "max_output_tokens"}}
    return {
        "incomplete_details": reasons.get(last.finish_reason, {"reason": "cancelled"}) if last.finish_reason else None,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": shown.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        },
        "metrics": metrics_object([last.speculation]),
    }
