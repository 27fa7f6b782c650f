"""The tools of a chat, and which of them the model may or must call."""

from __future__ import annotations

import dataclasses
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.common.hints import did_you_mean

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # as OpenAI, and dots, which some clients use

Need = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may ask its client to call."""

    name: str
    parameters: dict[str, Any]  # JSON schema of an object
    description: str | None = None
    is_strict: bool = False  # constraints that the grammar cannot enforce are refused, not left out

    def as_template_input(self) -> dict[str, Any]:
        """Return the tool in the form of chat templates."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of a chat, and how the model may use them."""

    tools: tuple[Tool, ...] = ()
    need: Need = "none"
    only: str | None = None  # the function that must be called
    is_parallel: bool = True  # allow several calls in one answer

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.need == "none":
            return ()
        return tuple(tool for tool in self.tools if self.only in (None, tool.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call in an answer, or more arguments of the call before it; a call's joined arguments are JSON."""

    name: str = ""  # "": more arguments of the call before
    arguments: str
    id: str = field(compare=False, default="")


def new_call(name: str, arguments: str) -> ToolCall:
    """Return a call with a new id."""
    return ToolCall(name=name, arguments=arguments, id=f"call_{uuid.uuid4().hex[:24]}")


def joined_calls(pieces: Iterable[ToolCall]) -> tuple[ToolCall, ...]:
    """Join pieces of calls; the first piece may be arguments of an earlier call."""
    groups: list[list[ToolCall]] = []
    for piece in pieces:
        if piece.name or not groups:
            groups.append([])
        groups[-1].append(piece)
    return tuple(
        dataclasses.replace(group[0], arguments="".join(piece.arguments for piece in group)) for group in groups
    )


def read_tool_use(tools: Sequence[object], choice: object, is_parallel: bool | None) -> ToolUse:
    """Read `tools`, `tool_choice` and `parallel_tool_calls`; raises `InvalidRequest` naming the field."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be at most {MAX_TOOLS}", "tools")
    read = tuple(_tool(index, tool) for index, tool in enumerate(tools))
    names = [tool.name for tool in read]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools: {twice!r} is there twice", "tools")
    need, only = _choice(choice, names)
    return ToolUse(tools=read, need=need, only=only, is_parallel=is_parallel is not False)


def _tool(index: int, tool: object) -> Tool:
    field_name = f"tools[{index}]"
    if not isinstance(tool, dict):
        raise InvalidRequest(f"{field_name} must be an object", "tools")
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"{field_name}.type must be function: {tool['type']!r} is not served here", "tools")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{field_name}.function must be an object", "tools")
    name, parameters, description = function.get("name"), function.get("parameters"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{field_name}.function.name must be 1 to 64 letters, digits, _, . and -", "tools")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise InvalidRequest(f"{field_name}.function.parameters must be the JSON schema of an object", "tools")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{field_name}.function.description must be a string", "tools")
    if not isinstance(is_strict := function.get("strict"), bool | None):
        raise InvalidRequest(f"{field_name}.function.strict must be a boolean", "tools")
    schema = {"type": "object", **parameters}
    return Tool(name=name, parameters=schema, description=description, is_strict=bool(is_strict))


def _choice(choice: object, names: Sequence[str]) -> tuple[Need, str | None]:
    match choice:
        case None:
            return ("auto" if names else "none"), None
        case "none":
            return "none", None
        case "auto":
            return ("auto" if names else "none"), None
        case "required":
            if not names:
                raise InvalidRequest("tool_choice: required needs tools", "tool_choice")
            return "required", None
        case {"type": "function", "function": {"name": str(name)}}:
            if name not in names:
                hint = did_you_mean(name, names)
                raise InvalidRequest(f"tool_choice: there is no tool {name!r}{hint}", "tool_choice")
            return "required", name
    raise InvalidRequest(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}', "tool_choice"
    )
