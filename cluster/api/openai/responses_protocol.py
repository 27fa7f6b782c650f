"""/v1/responses, request side: a body becomes a chat. responses.py has the answer side."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.cluster.api.openai.protocol import ChatBody, ModelBody, parse_body
from outrider.cluster.common.errors import InvalidRequest

MAX_ITEMS = 4096
MAX_METADATA = 16  # entries, as OpenAI
ROLES = {"developer": "system"}  # OpenAI's name, and chat templates'
Message = dict[str, Any]


class ResponsesBody(ModelBody):
    """The body of /v1/responses. `passed_fields` are checked in the chat's body."""

    passed_fields = frozenset(
        (
            *("top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
            *("stop", "ignore_eos", "min_tokens", "priority", "target_inter_token_ms", "session_id", "cache_salt"),
            "history_key",
            *("bad_words", "disable_spec_decode", "num_speculative_tokens", "chat_template_kwargs", "prediction"),
        )
    )

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA)
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[str] | None = Field(default=None, max_length=0)
    temperature: float | None = None
    top_p: float | None = None

    def messages(self) -> list[Message]:
        """Return the input as a chat's messages; raises `InvalidRequest`."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not 1 <= len(self.input) <= MAX_ITEMS:
            raise InvalidRequest(f"input must be text or 1 to {MAX_ITEMS} items", "input")
        messages: list[Message] = []
        for index, item in enumerate(self.input):
            _add_item(messages, item, f"input[{index}]")
        return messages

    def chat(self, messages: Sequence[Message]) -> ChatBody:
        """Return a chat of these messages with the body's other fields; raises `InvalidRequest`."""
        given = self.model_extra or {}
        fields = {name: given[name] for name in self.passed_fields if given.get(name) is not None}
        for name in ("model", "temperature", "top_p", "parallel_tool_calls", "store"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        fields |= {"messages": list(messages), **_format_fields(self.text), **_reasoning_fields(self.reasoning)}
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            fields["tools"] = [_chat_tool(index, tool) for index, tool in enumerate(self.tools)]
        if self.tool_choice is not None:
            fields["tool_choice"] = _chat_choice(self.tool_choice)
        return parse_body(fields, ChatBody)


_OWN_NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}


@contextlib.contextmanager
def in_own_field_names(own_names: Mapping[str, str] = _OWN_NAMES) -> Iterator[None]:
    """Rename the fields in a chat's errors to those of the body that became the chat."""
    try:
        yield
    except InvalidRequest as error:
        if error.field is None or error.field not in own_names:
            raise
        name = own_names[error.field]
        raise InvalidRequest(str(error).replace(error.field, name, 1), name) from error


def in_own_name(warning: str) -> str:
    """Return a chat's warning with the field's name in the responses body."""
    field, _, rest = warning.partition(":")
    return f"{_OWN_NAMES.get(field, field)}:{rest}"


def _add_item(messages: list[Message], item: Mapping[str, Any], place: str) -> None:
    """Add an input item; a call joins the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise InvalidRequest(f"{place}.role must be a string", "input")
        messages.append({"role": ROLES.get(role, role), "content": _text(item.get("content"), f"{place}.content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind != "reasoning":  # earlier reasoning is not shown to the model
        raise InvalidRequest(f"{place}.type {kind!r} is not supported", "input")


def _text(content: object, place: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{place} must be text or a list of parts", "input")
    texts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text")
        if not is_text or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise InvalidRequest(f"{place}: a part of type {kind!r} is not supported", "input")
        texts.append(part["text"])
    return "".join(texts)


def _chat_tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise InvalidRequest(f"tools[{index}].type must be function: {tool.get('type')!r} is not served here", "tools")
    if isinstance(tool.get("function"), dict):  # the form of a chat, which some clients send here too
        return dict(tool)
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _chat_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    return dict(choice)


def _format_fields(text: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in (text or {}).keys() - {"format", "verbosity"}:
        raise InvalidRequest(f"text: unknown field {name!r}", "text")
    form = (text or {}).get("format")
    if form is None:
        return {}
    if not isinstance(form, dict):
        raise InvalidRequest("text.format must be an object", "text")
    if form.get("type") != "json_schema":
        return {"response_format": dict(form)}
    described = {key: value for key, value in form.items() if key != "type"}
    return {"response_format": {"type": "json_schema", "json_schema": described}}


def _reasoning_fields(reasoning: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in (reasoning or {}).keys() - {"effort", "summary", "generate_summary"}:
        raise InvalidRequest(f"reasoning: unknown field {name!r}", "reasoning")
    effort = (reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise InvalidRequest("reasoning.effort must be a string", "reasoning")
    return {} if effort is None else {"reasoning_effort": effort}
