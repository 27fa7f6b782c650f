"""A chat's messages, as clients send them and as chat templates take them.

Agents send back what they were answered, here or elsewhere, with all its fields. What has text for the model is read,
whatever its name; what has none is passed over with a warning; what the model would miss, such as an image, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.common.hints import misspelt

MAX_MESSAGES = 4096  # of one chat
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # and their fields
_THOUGHT_PARTS = {"thinking": "thinking", "reasoning": "text", "reasoning_text": "text", "summary_text": "text"}
_EMPTY_PARTS = {"redacted_thinking"}  # a thought that only its maker can read
_READ_FIELDS = {"reasoning", "refusal", "function_call"}  # beside those of `ChatMessage`
_UNSERVED_FIELDS = {"audio"}  # with a value, the message is more than its text
_ROLES = {"function": "tool"}  # the former name


class ChatMessage(BaseModel):
    """One message. Unknown fields are kept, to be named in a warning."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None  # of the speaker, for templates that show it
    tool_calls: list[dict[str, Any]] | None = None  # of an assistant message
    tool_call_id: str | None = None  # of a tool message
    reasoning_content: str | None = None  # of an assistant message, for templates that repeat it

    def as_template_input(self) -> dict[str, Any]:
        """Return the message in the form of chat templates, with its text parts joined; raises `InvalidRequest`."""
        extra = self.model_extra or {}
        for name in _UNSERVED_FIELDS & extra.keys():
            if extra[name]:
                raise InvalidRequest(f"messages: {name!r} is not supported", "messages")
        message: dict[str, Any] = {"role": _ROLES.get(self.role, self.role), "content": self._text()}
        for name in ("name", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if thought := self._thought():
            message["reasoning_content"] = thought
        calls = self.tool_calls or []
        if not calls and extra.get("function_call"):  # the former form of a single call
            calls = [{"type": "function", "function": extra["function_call"]}]
        if calls:
            message["tool_calls"] = [_call_of_template(call) for call in calls]
        return message

    def unread_fields(self) -> Iterator[str]:
        """Yield the names of fields that have a value and no effect; raises `InvalidRequest` for misspelt ones."""
        for name, value in (self.model_extra or {}).items():
            if not value or name in _READ_FIELDS:  # null and empty say nothing
                continue
            if hint := misspelt(name, ChatMessage.model_fields):
                raise InvalidRequest(f"messages: {name!r} is not supported{hint}", "messages")
            yield name

    def _text(self) -> str:
        if isinstance(self.content, list):
            texts = (part if isinstance(part, str) else text_of_part(part, "messages") for part in self.content)
            return "".join(texts)
        refusal = (self.model_extra or {}).get("refusal")
        return self.content or (refusal if isinstance(refusal, str) else "")

    def _thought(self) -> str | None:
        reasoning = (self.model_extra or {}).get("reasoning")
        if isinstance(said := self.reasoning_content or reasoning, str):
            return said
        parts = self.content if isinstance(self.content, list) else []
        return "".join(thought_of_part(part) for part in parts if isinstance(part, dict))


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


def template_input(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates; raises `InvalidRequest`."""
    return [message.as_template_input() for message in messages]


def unread_warnings(messages: Sequence[ChatMessage]) -> tuple[str, ...]:
    """Return a warning that names the messages' fields without effect; raises `InvalidRequest` for misspelt ones."""
    names = dict.fromkeys(name for message in messages for name in message.unread_fields())
    return (f"messages: passed over: {', '.join(names)}",) if names else ()


def text_of_part(part: Mapping[str, Any], field: str, place: str = "messages") -> str:
    """Return a content part's text, "" of a thought; raises `InvalidRequest` naming `field` if it has another type."""
    kind = part.get("type")
    if isinstance(kind, str) and (kind in _EMPTY_PARTS or kind in _THOUGHT_PARTS):
        return ""
    text = part.get(_TEXT_PARTS[kind]) if isinstance(kind, str) and kind in _TEXT_PARTS else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{place}: content of type {kind!r} is not supported", field)
    return text


def thought_of_part(part: Mapping[str, Any]) -> str:
    """Return the thought in a content part, "" if it has none."""
    kind = part.get("type")
    text = part.get(_THOUGHT_PARTS[kind]) if isinstance(kind, str) and kind in _THOUGHT_PARTS else None
    return text if isinstance(text, str) else ""


def _call_of_template(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return an earlier call; its arguments stay as they are until the template is known."""
    function = call.get("function")
    custom = call.get("custom")
    if function is None and isinstance(custom, dict):  # OpenAI's calls whose argument is a text
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input")}}
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest("messages: a tool call must have a function with a name", "messages")
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": function.get("arguments")},
    }
