"""An answer as Anthropic's blocks: thinking, text and tool_use, in the order of generation, and the events of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from outrider.cluster.gateway.choice import Usage
from outrider.cluster.replies.reader import ReplyPart
from outrider.cluster.replies.tools import ToolCall

Event = dict[str, Any]
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_UNREADABLE = "INVALID_JSON"  # the key under which Anthropic's clients hand on arguments that are no JSON object


class ContentBlocks:
    """A message's growing content."""

    def __init__(self, signature: str) -> None:
        """`signature` stands under each thought: clients send it back, and want one."""
        self.blocks: list[dict[str, Any]] = []
        self._signature = signature
        self._is_open = False
        self._arguments: list[str] = []  # of the open block, if it is a call

    @property
    def has_calls(self) -> bool:
        """Whether a tool was called."""
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, said: ReplyPart) -> Iterator[Event]:
        """Add a part of the answer; yield its events."""
        more = [call for call in said.calls[:1] if not call.name]  # arguments of the open call
        for call in more:
            yield self._grown(call.arguments)
        if said.reasoning:
            yield from self._text("thinking", said.reasoning)
        if said.content:
            yield from self._text("text", said.content)
        for call in said.calls[len(more) :]:
            yield from self._call(call)

    def close(self) -> Iterator[Event]:
        """End the open block."""
        if not self._is_open:
            return
        self._is_open = False
        block = self.blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _input(self._taken_arguments())
        if block["type"] == "thinking":
            block["signature"] = self._signature
            yield self._delta({"type": "signature_delta", "signature": self._signature})
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            yield from self._begin({"type": "text", "text": ""} if kind == "text" else _thought())
        delta, name = _DELTAS[kind]
        self.blocks[-1][name] += text
        yield self._delta({"type": delta, name: text})

    def _call(self, call: ToolCall) -> Iterator[Event]:
        id_ = f"toolu_{call.id.removeprefix('call_')}"
        yield from self._begin({"type": "tool_use", "id": id_, "name": call.name, "input": {}})
        yield self._grown(call.arguments)

    def _begin(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self.blocks.append(block)
        self._is_open = True
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _grown(self, arguments: str) -> Event:
        self._arguments.append(arguments)
        return self._delta({"type": "input_json_delta", "partial_json": arguments})

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}

    def _taken_arguments(self) -> str:
        taken, self._arguments = self._arguments, []
        return "".join(taken)


def _thought() -> dict[str, Any]:
    return {"type": "thinking", "thinking": "", "signature": ""}


def _input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments; what is no object, such as one that was cut off, is kept as text."""
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        read = None
    return read if isinstance(read, dict) else {_UNREADABLE: arguments}


def usage_object(usage: Usage, *, num_reasoning_tokens: int = 0) -> dict[str, Any]:
    """Render token counts: the input's are those that were computed, beside those that were cached."""
    return {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
        **({"output_tokens_details": {"thinking_tokens": num_reasoning_tokens}} if num_reasoning_tokens else {}),
    }
