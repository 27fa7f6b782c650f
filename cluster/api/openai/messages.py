"""/v1/messages, Anthropic's Messages API: a body becomes a chat, its answer a message of blocks, or their events.

Stands on a chat as /v1/responses does; cluster/api/anthropic translates.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field

from outrider.cluster.api.anthropic.blocks import ContentBlocks, Event, usage_object
from outrider.cluster.api.anthropic.errors import error_object
from outrider.cluster.api.anthropic.history import ChatHistory
from outrider.cluster.api.anthropic.options import SILENT_FIELDS, output_fields, thinking_fields, tool_fields
from outrider.cluster.api.openai.answer import Answer, event_of
from outrider.cluster.api.openai.chat_messages import MAX_MESSAGES
from outrider.cluster.api.openai.format import ChatFormat, ShownChoice, metrics_object
from outrider.cluster.api.openai.protocol import ChatBody, ModelBody, parse_body
from outrider.cluster.api.openai.responses_protocol import ResponsesBody
from outrider.cluster.common.errors import OutriderError, RequestFailed
from outrider.cluster.gateway.choice import GatewayChunk, Usage
from outrider.cluster.gateway.client_fields import Texts
from outrider.verifier_service.messages.request import FinishReason

OWN_NAMES = {  # of a chat's fields, for errors
    "stop": "stop_sequences",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
    "thinking_token_budget": "thinking",
}
_SAME_NAMES = ("model", "max_tokens", "temperature", "top_p", "top_k", "stream")
SAMPLING_FIELDS = frozenset({*_SAME_NAMES, "stop_sequences"}) - {"model"}
_AS_IN_A_CHAT = ResponsesBody.passed_fields | {"store"}


class CountTokensBody(ModelBody):
    """The body of /v1/messages/count_tokens, which may have all that /v1/messages takes."""

    passes_over_unknown = True
    passed_fields = _AS_IN_A_CHAT | SILENT_FIELDS | SAMPLING_FIELDS

    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Any] | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None

    def chat(self) -> tuple[ChatBody, list[str]]:
        """Return the chat that the body stands for, and warnings; raises `InvalidRequest`."""
        history = ChatHistory()
        history.add_system(self.system)
        for index, message in enumerate(self.messages):
            history.add(message, f"messages[{index}]")
        history.end()
        tools, servers = tool_fields(self.tools or [], self.tool_choice)
        given = self.model_extra or {}
        fields = {name: given[name] for name in _AS_IN_A_CHAT if given.get(name) is not None}
        kwargs, budget = thinking_fields(self.thinking)
        if isinstance(given_kwargs := fields.get("chat_template_kwargs", {}), dict):  # else the chat refuses it
            fields["chat_template_kwargs"] = kwargs | given_kwargs
        fields |= {**budget, **tools, **output_fields(self.output_config), **self.sampling_fields()}
        last = history.messages[-1] if history.messages else {}
        if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
            fields["continue_final_message"] = True  # the answer goes on with it
        chat = parse_body({**fields, "messages": history.messages}, ChatBody)
        left_out = [f"tools: left out: {kind} is run by Anthropic's servers" for kind in servers]
        left_out += [f"messages: left out: a block of type {kind}" for kind in dict.fromkeys(history.left_out)]
        return chat, [*self.unread_warnings(), *left_out]

    def sampling_fields(self) -> dict[str, Any]:
        """Return the chat's fields about how it is answered."""
        return {} if self.model is None else {"model": self.model}


class MessagesBody(CountTokensBody):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Texts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """Return the chat's fields about how it is answered."""
        fields = {name: value for name in _SAME_NAMES if (value := getattr(self, name)) is not None}
        return fields | ({"stop": self.stop_sequences} if self.stop_sequences else {})


class MessagesFormat(ChatFormat):
    """A chat's format under the ids of messages, which are rendered here."""

    id_prefix = "msg_"


@dataclass(slots=True, kw_only=True)
class MessagesAnswer:
    """The answer to one call of /v1/messages."""

    answer: Answer  # of the chat
    max_tokens: int
    content: ContentBlocks = field(init=False)

    def __post_init__(self) -> None:
        self.content = ContentBlocks(signature=self.answer.id)

    @property
    def id(self) -> str:
        """The id of the message and of its generation."""
        return self.answer.id

    async def unary(self) -> dict[str, Any]:
        """Generate to the end and return the message."""
        message: dict[str, Any] = {}
        async with aclosing(self._steps(whole=True)) as steps:  # type: ignore[type-var]
            async for step in steps:
                if step["type"] == "message_start":
                    message = step["message"]
                elif step["type"] == "message_delta":
                    ending = {"usage": step["usage"], "metrics": step["metrics"]}
                    message = {**message, **step["delta"], **ending, "content": self.content.blocks}
        return message

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the stream's events."""
        async with aclosing(self._steps()) as steps:  # type: ignore[type-var]
            async for step in steps:
                yield event_of(step, step["type"])

    def failure(self, error: OutriderError) -> bytes:
        """Return the event of an error in a stream that has begun."""
        return event_of(error_object(error), "error")

    async def _steps(self, *, whole: bool = False) -> AsyncIterator[Event]:
        shown = self.answer.shown(0)
        last: GatewayChunk | None = None
        async with aclosing(self.answer.chunks(whole=whole)) as chunks:  # type: ignore[type-var]
            async for _, chunk in chunks:
                if last is None:  # not before the first chunk: an early error has its own status
                    yield {"type": "message_start", "message": self._start()}
                    yield {"type": "ping"}
                last = chunk
                shown.take(chunk)
                for event in self.content.add(shown.said):
                    yield event
        assert last is not None
        assert last.usage is not None
        if last.finish_reason is FinishReason.ABORT:
            raise RequestFailed("the request was aborted")
        for event in self.content.close():
            yield event
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": self._stop_reason(last, shown), "stop_sequence": last.stop_string},
            "usage": usage_object(last.usage, num_reasoning_tokens=shown.num_reasoning_tokens),
            "metrics": metrics_object([last.speculation]),
        }
        yield {"type": "message_stop"}

    def _start(self) -> dict[str, Any]:
        request = self.answer.requests[0]
        prompt = Usage(num_prompt_tokens=len(request.prompt_token_ids), num_completion_tokens=0, num_cached_tokens=0)
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": request.adapter or self.answer.gateway.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_object(prompt),
            **self.answer.warning_fields(),
        }

    def _stop_reason(self, last: GatewayChunk, shown: ShownChoice) -> str:
        if last.finish_reason is FinishReason.LENGTH:
            request = self.answer.requests[0]
            room = self.answer.gateway.model.max_model_len - len(request.prompt_token_ids)
            is_full = request.sampling.max_tokens == room < self.max_tokens  # else the model's files may bound it
            return "model_context_window_exceeded" if is_full else "max_tokens"
        if last.stop_string is not None:
            return "stop_sequence"
        return "tool_use" if self.content.has_calls and not shown.is_within_call else "end_turn"
