"""Chats as a model's template takes them: the arguments of a tool call are a mapping there, or JSON text.

Clients send text, programs of their own a mapping. Most templates want a mapping: they walk it, or write it with
`tojson`, which quotes a text once more. Others join the text to theirs, and fail with a mapping, or print it, and of a
mapping that is Python's `{'a': 1}`. Which kind a template is, it is asked once, with a chat of one call.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_TEMPLATES = 16  # whose form is remembered: a model has one or two, a program may bring its own
_ARGUMENTS = {"of_probe": "value"}
_CALL_ID = "abcdef123"  # nine letters and digits: Mistral's templates take no other
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
# Some templates show calls only where there are tools, or no content; others fail without one of them.
_TRIALS = [(said, tools) for said in ({"content": ""}, {}) for tools in (None, [_TOOL])]


class ArgumentsError(ValueError):
    """Arguments of a tool call that the model's template cannot take; the text names them."""


class ChatWriter:
    """Writes chats through the templates of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:  # transformers.PreTrainedTokenizerBase, which has no types
        self._tokenizer = tokenizer
        self._takes_text = functools.lru_cache(MAX_TEMPLATES)(self._tell_form)

    def write(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> str:
        """Return a chat's text; `fields` are of `apply_chat_template`, or the template's own.

        Raises `ArgumentsError` for arguments that cannot be had in the template's form, and whatever the template does.
        """
        if any(_calls_of(message) for message in messages):
            template = self._tokenizer.get_chat_template(fields.get("chat_template"), fields.get("tools"))
            messages = [_in_form(message, is_text=self._takes_text(template)) for message in messages]
        return str(self._tokenizer.apply_chat_template(list(messages), tokenize=False, **fields))

    def _tell_form(self, template: str) -> bool:
        """Return whether a template takes arguments as text; one that takes both, or shows none, gets a mapping."""
        return any(self._wants_text(template, said, tools) for said, tools in _TRIALS)

    def _wants_text(self, template: str, said: Mapping[str, str], tools: list[Any] | None) -> bool:
        if self._tried(template, said, tools, json.dumps(_ARGUMENTS)) is None:
            return False
        written = self._tried(template, said, tools, _ARGUMENTS)
        return written is None or repr(_ARGUMENTS) in written

    def _tried(
        self, template: str, said: Mapping[str, str], tools: list[Any] | None, arguments: str | Mapping[str, str]
    ) -> str | None:
        """Return what the template makes of a chat with one call; None: it fails."""
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "probe", "arguments": arguments}}
        messages = [{"role": "user", "content": "Probe."}, {"role": "assistant", **said, "tool_calls": [call]}]
        try:
            return str(
                self._tokenizer.apply_chat_template(messages, tools=tools, chat_template=template, tokenize=False)
            )
        except Exception:  # templates fail in their own ways; the chat itself will tell the user how
            return None


def _calls_of(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return list(calls) if isinstance(calls, list | tuple) else []


def _in_form(message: Mapping[str, Any], *, is_text: bool) -> Mapping[str, Any]:
    """Return a message with the arguments of its calls in one form; what is no call is left to the template."""
    calls = _calls_of(message)
    return {**message, "tool_calls": [_call_in_form(call, is_text=is_text) for call in calls]} if calls else message


def _call_in_form(call: Any, *, is_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _function_in_form(call["function"], call.get("id"), is_text=is_text)}
    return _function_in_form(call, call.get("id"), is_text=is_text)  # some programs leave the `function` around it out


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
    """Return arguments as the text that models learn calls from; a text stays as it is."""
    if isinstance(arguments, str):
        return arguments
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)  # as the templates' own `tojson`


def _as_mapping(arguments: Any) -> Mapping[str, Any]:
    """Return what arguments say; raises `ValueError` where that is no object, or cannot be written as UTF-8."""
    if isinstance(arguments, str) and arguments.strip():
        text, arguments = arguments, json.loads(arguments)
        if "\\u" in text:  # only an escape can smuggle half a surrogate pair in
            json.dumps(arguments, ensure_ascii=False).encode()
    elif arguments is None or isinstance(arguments, str):  # some clients send no text where there are none
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{json.dumps(arguments)[:40]} is none")
    return arguments
