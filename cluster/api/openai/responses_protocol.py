"""/v1/responses, request side: a body becomes a chat. responses.py has the answer side."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from outrider.cluster.api.openai.chat_messages import text_of_part, thought_of_part
from outrider.cluster.api.openai.protocol import ChatBody, ModelBody, StreamOptions, parse_body
from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.common.hints import misspelt
from outrider.cluster.gateway.client_fields import RESPONSES, named_at

MAX_ITEMS = 4096
MAX_METADATA = 16  # entries, as OpenAI
Message = dict[str, Any]
Item = Mapping[str, Any]
FindItem = Callable[[str], Awaitable[Item]]  # an item that was answered before, by its id; raises `InvalidRequest`
# calls of tools that OpenAI or its clients run themselves: the name that the call gets, and its field of arguments
_CALLS = {
    "function_call": (None, "arguments"),
    "custom_tool_call": (None, "input"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
_OUTPUTS = {f"{name}_output" for name in ("function_call", "custom_tool_call", "local_shell_call", "shell_call")} | {
    "apply_patch_call_output"
}
# what a server did with tools of its own: the model has seen the answer that followed
_PASSED_OVER = {
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("computer_call", "mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("tool_search_call", "tool_search_output"),
}


class ResponsesBody(ModelBody):
    """The body of /v1/responses. `passed_fields` are checked in the chat's body."""

    passes_over_unknown = True
    passed_fields = frozenset(
        (
            *named_at(RESPONSES),
            *("chat_template_kwargs", "prediction", "include_reasoning", "thinking_token_budget"),
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
    metadata: dict[str, Any] | None = Field(default=None, max_length=MAX_METADATA)
    truncation: Literal["disabled", "auto"] | None = None
    background: Literal[False] | None = None
    conversation: Literal[None] = None
    prompt: Literal[None] = None  # OpenAI's stored prompts
    include: list[str] | None = None
    max_tool_calls: int | None = None  # of tools that the server runs: here it runs none
    top_logprobs: Literal[0] | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None

    async def messages(self, find_item: FindItem) -> list[Message]:
        """Return the input as a chat's messages; raises `InvalidRequest`."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        if not 1 <= len(self.input) <= MAX_ITEMS:
            raise InvalidRequest(f"input must be text or 1 to {MAX_ITEMS} items", "input")
        messages: list[Message] = []
        for index, item in enumerate(self.input):
            is_reference = item.get("type") == "item_reference" or set(item) == {"id"}
            whole = await find_item(str(item.get("id"))) if is_reference else item
            _add_item(messages, whole, f"input[{index}]")
        return messages

    def warnings(self) -> tuple[str, ...]:
        """Return what the client must know of fields without effect."""
        items = self.input if isinstance(self.input, list) else []
        types = (item.get("type") for item in items)
        kinds = dict.fromkeys(kind for kind in types if isinstance(kind, str) and kind in _PASSED_OVER)
        told = {
            "input": f"passed over: {', '.join(kinds)}" if kinds else None,
            "include": f"not served here: {', '.join(self.include)}" if self.include else None,
            "truncation": "nothing is left out of the input here" if self.truncation == "auto" else None,
            "text": _unread(self.text, _TEXT_FIELDS, "text"),
            "reasoning": _unread(self.reasoning, _REASONING_FIELDS, "reasoning"),
        }
        said = tuple(f"{name}: {text}" for name, text in told.items() if text is not None)
        return (*said, *self.unread_warnings())

    def chat(self, messages: Sequence[Message]) -> ChatBody:
        """Return a chat of these messages with the body's other fields; raises `InvalidRequest`."""
        given = self.model_extra or {}
        fields = {name: given[name] for name in self.passed_fields if given.get(name) is not None}
        for name in ("model", "temperature", "top_p", "parallel_tool_calls", "store", "tool_choice"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if self.instructions is not None:
            messages = [{"role": "system", "content": self.instructions}, *messages]
        fields |= {"messages": list(messages), **_format_fields(self.text), **_reasoning_fields(self.reasoning)}
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            fields["tools"] = self.tools
        return parse_body(fields, ChatBody)


_OWN_NAMES = {"max_completion_tokens": "max_output_tokens", "messages": "input", "response_format": "text"}


@contextlib.contextmanager
def in_own_field_names(own_names: Mapping[str, str] = _OWN_NAMES) -> Iterator[None]:
    """Rename the fields in a chat's errors to those of the body that became the chat."""
    try:
        yield
    except InvalidRequest as error:
        if error.field is not None and error.field in own_names:
            name = own_names[error.field]
            error.args, error.field = (str(error).replace(error.field, name, 1),), name
        raise


def in_own_name(warning: str) -> str:
    """Return a chat's warning with the field's name in the responses body."""
    field, _, rest = warning.partition(":")
    return f"{_OWN_NAMES.get(field, field)}:{rest}"


def _add_item(messages: list[Message], item: Item, place: str) -> None:
    """Add an input item; a call joins the assistant's message before it."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise InvalidRequest(f"{place}.role must be a string", "input")
        messages.append({"role": role, "content": _text(item.get("content"), f"{place}.content")})
    elif isinstance(kind, str) and kind in _CALLS:
        name, field = _CALLS[kind]
        arguments = {"input": item.get("input")} if kind == "custom_tool_call" else item.get(field)
        function = {"name": name or item.get("name"), "arguments": arguments}
        call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif isinstance(kind, str) and kind in _OUTPUTS:
        call_id = item.get("call_id") or item.get("id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _output(item.get("output"), place)})
    elif not isinstance(kind, str) or (kind != "reasoning" and kind not in _PASSED_OVER):  # no thought is shown again
        raise InvalidRequest(f"{place}.type {kind!r} is not supported", "input")


def _text(content: object, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{place} must be text or a list of parts", "input")
    return "".join(part if isinstance(part, str) else _text_of_part(part, place) for part in content)


def _text_of_part(part: object, place: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{place}: a part must be an object, not {part!r}", "input")
    return thought_of_part(part) if part.get("type") == "summary_text" else text_of_part(part, "input", place)


def _output(output: object, place: str) -> str:
    """Return what a tool said: text, parts of text, or what a shell printed as objects."""
    is_parts = isinstance(output, list) and all(isinstance(part, dict) and "type" in part for part in output)
    if output is None or isinstance(output, str) or is_parts:
        return _text(output, f"{place}.output")
    return json.dumps(output, ensure_ascii=False)


_TEXT_FIELDS = {"format", "verbosity"}
_REASONING_FIELDS = {"effort", "summary", "generate_summary"}


def _unread(fields: Mapping[str, Any] | None, known: Collection[str], place: str) -> str | None:
    """Return a warning about the unknown members of an object; raises `InvalidRequest` for misspelt ones."""
    names = [name for name in fields or {} if name not in known]
    for name in names:
        if hint := misspelt(name, known):
            raise InvalidRequest(f"{place}: unknown field {name!r}{hint}", place)
    return f"passed over: {', '.join(names)}" if names else None


def _format_fields(text: Mapping[str, Any] | None) -> dict[str, Any]:
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
    effort = (reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise InvalidRequest("reasoning.effort must be a string", "reasoning")
    return {} if effort is None else {"reasoning_effort": effort}
