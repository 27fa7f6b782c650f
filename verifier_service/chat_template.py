"""Render chats as the model's template expects them: system texts in one message at the beginning, calls in its form.

OpenAI's `developer` is `system` to templates that do not name it, which would leave such a message out without a word.
System texts that begin a chat become one; where the template fails, all of them do, then the first user's message has
them. Agents send several, and templates may raise at a second one, at a late one or at any.

The arguments of tool calls are a mapping or JSON text.
HTTP clients send text, Python programs may pass a mapping. Most templates want a mapping: they iterate over it, or
print it with `tojson`, which would quote text twice. Others concatenate text, and fail with a mapping or print Python's
`{'a': 1}`. A trial chat with one tool call, rendered once per template, tells which form it wants.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

DEVELOPER = "developer"
MAX_TEMPLATES = 16  # cached trial results; a model has one or two templates, a program may pass its own
_ARGUMENTS = {"of_probe": "value"}
_CALL_ID = "abcdef123"  # Mistral's templates require nine letters and digits
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"of_probe": {"type": "string", "description": "A text."}},
            "required": ["of_probe"],
        },
    },
}
# Some templates render calls only with tools, or without content; others fail without one of them.
_TRIALS = [(said, tools) for said in ({"content": ""}, {}) for tools in (None, [_TOOL])]


class ArgumentsError(ValueError):
    """A tool call's arguments cannot be converted to the template's form; the text names the call."""


class ChatWriter:
    """Renders chats with the templates of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # transformers.PreTrainedTokenizerBase, which has no types
        self._tokenizer = tokenizer
        self._takes_text = functools.lru_cache(MAX_TEMPLATES)(self._try_template)

    def write(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """Return a chat's text; `fields` go to `apply_chat_template` and the template.

        Raises `ArgumentsError` if arguments cannot be converted to the template's form, and the template's errors.
        """
        template = None
        if any(_role_of(message) == DEVELOPER or _calls_of(message) for message in messages):
            template = self._tokenizer.get_chat_template(fields.get("chat_template"), fields.get("tools"))
        if template is not None and DEVELOPER not in template:
            messages = [{**m, "role": "system"} if _role_of(m) == DEVELOPER else m for m in messages]
        if any(_calls_of(message) for message in messages):
            assert template is not None
            messages = [_in_form(message, is_text=self._takes_text(template)) for message in messages]
        messages = with_one_beginning(messages)
        errors: list[Exception] = []
        for form in (messages, with_systems_first(messages), with_systems_as_users(messages)):
            if form is None:
                continue
            try:
                return str(self._tokenizer.apply_chat_template(list(form), tokenize=False, **fields))
            except Exception as error:  # a template may raise anything
                errors.append(error)
        raise errors[0]

    def _try_template(self, template: str) -> bool:
        """Return whether a template wants arguments as text; False if it accepts both or renders none."""
        return any(self._wants_text(template, said, tools) for said, tools in _TRIALS)

    def _wants_text(self, template: str, said: Mapping[str, str], tools: list[Any] | None) -> bool:
        if self._tried(template, said, tools, json.dumps(_ARGUMENTS)) is None:
            return False
        written = self._tried(template, said, tools, _ARGUMENTS)
        return written is None or repr(_ARGUMENTS) in written

    def _tried(
        self, template: str, said: Mapping[str, str], tools: list[Any] | None, arguments: str | Mapping[str, str]
    ) -> str | None:
        """Return the rendered trial chat with one call; None if the template fails."""
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages = [{"role": "user", "content": "Probe."}, {"role": "assistant", **said, "tool_calls": [call]}]
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
            )
        except Exception:  # any error of a template; the user's own chat will raise it again
            return None


def with_one_beginning(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return a chat whose first system messages are one."""
    num = sum(1 for _ in itertools.takewhile(_is_system, messages))
    return messages if num < 2 else [_joined(messages[:num]), *messages[num:]]


def with_systems_first(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]] | None:
    """Return a chat whose system messages are one at its beginning; None: it is so already."""
    systems = [message for message in messages if _is_system(message)]
    others = [message for message in messages if not _is_system(message)]
    return [_joined(systems), *others] if systems and systems != [messages[0]] else None


def with_systems_as_users(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]] | None:
    """Return a chat without system messages, whose texts begin its first user's; None: there is no place for them."""
    systems = [message for message in messages if _is_system(message)]
    others = [message for message in messages if not _is_system(message)]
    if not (systems and others and _role_of(others[0]) == "user" and isinstance(others[0].get("content"), str)):
        return None
    return [{**others[0], "content": _joined([*systems, others[0]])["content"]}, *others[1:]]


def _joined(messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return messages as one, with the first one's other fields."""
    return {**messages[0], "content": "\n\n".join(message["content"] for message in messages if message["content"])}


def _is_system(message: Any) -> bool:
    return _role_of(message) == "system" and isinstance(message.get("content"), str)


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _calls_of(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return list(calls) if isinstance(calls, list | tuple) else []


def _in_form(message: Mapping[str, Any], *, is_text: bool) -> Mapping[str, Any]:
    """Return a message with the arguments of its calls in one form; malformed calls are left to the template."""
    calls = _calls_of(message)
    return {**message, "tool_calls": [_call_in_form(call, is_text=is_text) for call in calls]} if calls else message


def _call_in_form(call: Any, *, is_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _function_in_form(call["function"], call.get("id"), is_text=is_text)}
    return _function_in_form(call, call.get("id"), is_text=is_text)  # some programs omit the enclosing `function`


def _function_in_form(function: Mapping[str, Any], call_id: Any, *, is_text: bool) -> Mapping[str, Any]:
    if "arguments" not in function:
        return function
    try:
        arguments = (_as_text if is_text else _as_mapping)(function["arguments"])
    except (ValueError, TypeError, RecursionError) as error:
        call = f"{function.get('name')!r}" + (f" ({call_id})" if call_id else "")
        kind = "JSON" if is_text else "a JSON object"
        raise ArgumentsError(
            f"tool_calls: function.arguments of {call} must be {kind} for this model's chat template: {error}"
        ) from error
    return {**function, "arguments": arguments}


def _as_text(arguments: Any) -> str:
    """Return arguments as JSON text; text stays unchanged."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)  # as `tojson` in templates


def _as_mapping(arguments: Any) -> Mapping[str, Any]:
    """Return arguments as a mapping; raises `ValueError` if they are no JSON object or cannot be encoded as UTF-8."""
    if isinstance(arguments, str) and arguments.strip():
        text, arguments = arguments, json.loads(arguments)
        if "\\u" in text:  # only an escape can contain half a surrogate pair
            json.dumps(arguments, ensure_ascii=False).encode()
    elif arguments is None or isinstance(arguments, str):  # some clients send null or "" for no arguments
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{json.dumps(arguments)[:40]} is none")
    return arguments
