"""A history of content blocks becomes a chat's messages.

| block | of the chat |
|---|---|
| text, a document that is text | the message's text |
| tool_use | a call of the assistant's message |
| tool_result | a message of the role tool, before the user's text |
| thinking | the assistant's reasoning |
| redacted_thinking, and what Anthropic's servers did | nothing |

A system message within the history joins the turn before it, as agents append one with almost every turn: at the head
of the prompt, it would change what the prefix cache has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.cluster.common.errors import InvalidRequest

Message = dict[str, Any]
Block = Mapping[str, Any]
_BREAK = "\n"  # between the texts of two blocks
_BILLING = "x-anthropic-billing-header:"  # begins a block of Claude Code's, other in each version: no text for a model
_SILENT = frozenset({"redacted_thinking"})
_OF_SERVERS = frozenset({"server_tool_use", "mcp_tool_use", "container_upload", "tool_addition", "tool_removal"})


class ChatHistory:
    """The messages of a chat, made of a system prompt and of messages of blocks."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.left_out: list[str] = []  # kinds of blocks without a meaning here
        self._held: list[str] = []  # of system messages that wait for the user's next turn

    def add_system(self, content: object, place: str = "system") -> None:
        """Add to the system prompt, or to the turn that is the last so far. Raises `InvalidRequest`."""
        text = self._text(content, place)
        role = self.messages[-1]["role"] if self.messages else "system"
        if not text:
            return
        if role == "assistant":
            self._held.append(text)
        elif role == "tool":  # a user's turn after a tool's result would end the reasoning that templates keep
            self.messages[-1]["content"] = _joined([self.messages[-1]["content"], text])
        else:
            self._put({"role": role, "content": text})

    def add(self, message: object, place: str) -> None:
        """Add a message. Raises `InvalidRequest` naming what in it is wrong."""
        if not isinstance(message, dict):
            raise InvalidRequest(f"{place} must be an object", "messages")
        content = message.get("content")
        match message.get("role"):
            case "user":
                self._add_user(content, f"{place}.content")
            case "assistant":
                self._add_assistant(content, f"{place}.content")
            case "system":
                self.add_system(content, f"{place}.content")
            case role:
                raise InvalidRequest(f"{place}.role must be user, assistant or system, not {role!r}", "messages")

    def end(self) -> None:
        """Add what still waits for a user's turn."""
        if self._held:
            self._put({"role": "user", "content": self._taken_held()})

    def _add_user(self, content: object, place: str) -> None:
        has_results = False
        rest: list[Block] = []
        for index, block in enumerate(_blocks(content, place)):
            if block["type"] == "tool_result":
                has_results = True
                self.messages.append(self._result(block, f"{place}[{index}]"))
            else:
                rest.append(block)
        text = _joined([self._taken_held(), self._text(rest, place)])
        if text or not has_results:
            self._put({"role": "user", "content": text})

    def _result(self, block: Block, place: str) -> Message:
        text = self._text(block.get("content"), f"{place}.content")
        shown = f"Error: {text}" if block.get("is_error") else text
        return {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown}

    def _add_assistant(self, content: object, place: str) -> None:
        rest: list[Block] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(_blocks(content, place)):
            match block["type"]:
                case "thinking":
                    thoughts.append(_string(block, "thinking", f"{place}[{index}]"))
                case "tool_use":
                    calls.append(_call(block, f"{place}[{index}]"))
                case _:
                    rest.append(block)
        message: Message = {"role": "assistant", "content": self._text(rest, place)}
        if thought := _joined(thoughts):
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        self._put(message)

    def _put(self, message: Message) -> None:
        """Append a message; turns of one role that follow each other are one."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != message["role"]:
            self.messages.append(message)
            return
        for name in ("content", "reasoning_content"):
            if text := _joined([last.get(name, ""), message.get(name, "")]):
                last[name] = text
        if calls := [*last.get("tool_calls", ()), *message.get("tool_calls", ())]:
            last["tool_calls"] = calls

    def _taken_held(self) -> str:
        held, self._held = self._held, []
        return _joined(held)

    def _text(self, content: object, place: str) -> str:
        """Return the text of text, of blocks of text, or of nothing."""
        return _joined([self._text_of(block, place) for block in _blocks(content, place)])

    def _text_of(self, block: Block, place: str) -> str:
        kind = block["type"]
        match kind:
            case "text":
                text = _string(block, "text", place)
                return "" if text.startswith(_BILLING) else text
            case "tool_reference":  # a tool that the client's own search has found
                return _string(block, "tool_name", place)
            case "search_result":
                return _joined([str(block.get("title", "")), self._text(block.get("content"), place)])
            case "document" if isinstance(source := block.get("source"), dict) and source.get("type") == "text":
                return _joined([str(block.get("title") or ""), _string(source, "data", place)])
            case _ if kind in _SILENT:
                return ""
            case _ if kind in _OF_SERVERS or kind.endswith("_tool_result"):
                self.left_out.append(kind)
                return ""
        raise InvalidRequest(f"{place}: a block of type {kind!r} is not supported", place.partition("[")[0])


def _joined(texts: Sequence[str]) -> str:
    return _BREAK.join(text for text in texts if text)


def _blocks(content: object, place: str) -> list[Block]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(
        isinstance(b, dict) and isinstance(b.get("type"), str) for b in content
    ):
        raise InvalidRequest(f"{place} must be text or a list of blocks, each with its type", place.partition("[")[0])
    return content


def _string(block: Block, name: str, place: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{place}: {name} must be a string", place.partition("[")[0])
    return value


def _call(block: Block, place: str) -> dict[str, Any]:
    given = block.get("input")
    if not isinstance(given, dict):
        raise InvalidRequest(f"{place}.input must be an object", "messages")
    function = {"name": block.get("name"), "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": block.get("id"), "type": "function", "function": function}
