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
MAX_NAME_CHARS = 128  # OpenAI has 64, Anthropic 128, and bridges put a server's name before a tool's
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")  # as OpenAI, and dots, which some clients use

_FUNCTION = "function"
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
    only: frozenset[str] | None = None  # the functions that may be called; None: all
    is_parallel: bool = True  # allow several calls in one answer
    left_out: tuple[str, ...] = ()  # types of tools that are no functions

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user must know of tools that the model does not see."""
        names = ", ".join(self.left_out)
        return (f"tools: left out, since only functions are served here: {names}",) if names else ()

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.need == "none":
            return ()
        return tuple(tool for tool in self.tools if self.only is None or tool.name in self.only)


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
    """Read `tools`, `tool_choice` and `parallel_tool_calls`; raises `InvalidRequest` naming the field.

    Tools that a server of another kind runs itself, such as a search, are left out.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools must be at most {MAX_TOOLS}", "tools")
    kinds = [_kind(index, tool) for index, tool in enumerate(tools)]
    read = tuple(_tool(index, tool) for index, tool in enumerate(tools) if kinds[index] == _FUNCTION)
    names = [tool.name for tool in read]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidRequest(f"tools: {twice!r} is there twice", "tools")
    need, only = _choice(choice, names)
    left_out = tuple(dict.fromkeys(kind for kind in kinds if kind != _FUNCTION))
    return ToolUse(tools=read, need=need, only=only, is_parallel=is_parallel is not False, left_out=left_out)


def _kind(index: int, tool: object) -> str:
    if not isinstance(tool, dict):
        raise InvalidRequest(f"tools[{index}] must be an object", "tools")
    if not isinstance(kind := tool.get("type", _FUNCTION), str):
        raise InvalidRequest(f"tools[{index}].type must be a string", "tools")
    return kind


def _tool(index: int, tool: object) -> Tool:
    assert isinstance(tool, dict)
    is_flat = "function" not in tool and "name" in tool  # the form of /v1/responses
    field_name = f"tools[{index}]" if is_flat else f"tools[{index}].function"
    function = tool if is_flat else tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{field_name} must be an object", "tools")
    name, parameters, description = function.get("name"), function.get("parameters"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = f"1 to {MAX_NAME_CHARS} letters, digits, _, . and -"
        raise InvalidRequest(f"{field_name}.name must be {expected}", "tools")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type") not in (None, "object", ["object"]):
        raise InvalidRequest(f"{field_name}.parameters must be the JSON schema of an object", "tools")
    if not isinstance(description, str | None):
        raise InvalidRequest(f"{field_name}.description must be a string", "tools")
    if not isinstance(is_strict := function.get("strict"), bool | None):
        raise InvalidRequest(f"{field_name}.strict must be a boolean", "tools")
    schema = {"type": "object", **{key: value for key, value in parameters.items() if key != "type"}}
    return Tool(name=name, parameters=schema, description=description, is_strict=bool(is_strict))


def _choice(choice: object, names: Sequence[str]) -> tuple[Need, frozenset[str] | None]:
    match choice:
        case None | "auto":
            return ("auto" if names else "none"), None
        case "none":
            return "none", None
        case "required":
            if not names:
                raise InvalidRequest("tool_choice: required needs tools", "tool_choice")
            return "required", None
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return "required", _only([name], names)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": [*allowed]}}:
            return mode, _only([_name_of(tool) for tool in allowed], names)
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": [*allowed]}:
            return mode, _only([_name_of(tool) for tool in allowed], names)
    raise InvalidRequest(
        'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}', "tool_choice"
    )


def _name_of(tool: object) -> str:
    match tool:
        case {"function": {"name": str(name)}} | {"name": str(name)}:
            return name
    raise InvalidRequest("tool_choice: an allowed tool must be a function with a name", "tool_choice")


def _only(allowed: Sequence[str], names: Sequence[str]) -> frozenset[str]:
    for name in allowed:
        if name not in names:
            hint = did_you_mean(name, names)
            raise InvalidRequest(f"tool_choice: there is no tool {name!r}{hint}", "tool_choice")
    if not allowed:
        raise InvalidRequest("tool_choice: one tool at least must be allowed", "tool_choice")
    return frozenset(allowed)
