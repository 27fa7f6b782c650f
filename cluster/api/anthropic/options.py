"""What a body of the Messages API says beside its history, as fields of a chat's body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider.cluster.common.errors import InvalidRequest

# Taken, without effect on the tokens.
SILENT_FIELDS = frozenset(
    (
        *("metadata", "service_tier", "context_management", "cache_control", "betas", "inference_geo", "speed"),
        *("diagnostics", "user_profile_id", "container"),
    )
)
_EFFORTS = {"xhigh": "high", "max": "high"}  # as chat templates know them
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def tool_fields(tools: Sequence[object], choice: Mapping[str, Any] | None) -> tuple[dict[str, Any], list[str]]:
    """Return the chat's tools and how to use them, and the names of those that only Anthropic's servers have.

    Raises `InvalidRequest` naming the field.
    """
    read, left_out = [], []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidRequest(f"tools[{index}] must be an object", "tools")
        if tool.get("type") in (None, "custom"):
            read.append(_chat_tool(tool, f"tools[{index}]"))
        else:
            left_out.append(str(tool["type"]))
    fields: dict[str, Any] = {"tools": read} if read else {}
    if choice is not None:
        fields["tool_choice"] = _chat_choice(choice)
        if choice.get("disable_parallel_tool_use"):
            fields["parallel_tool_calls"] = False
    return fields, left_out


def _chat_tool(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequest(f"{place}.input_schema must be an object", "tools")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _chat_choice(choice: Mapping[str, Any]) -> str | dict[str, Any]:
    match choice:
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": str(kind)} if kind in _CHOICES:
            return _CHOICES[kind]
    raise InvalidRequest("tool_choice must have the type auto, any, none, or tool with its name", "tool_choice")


def thinking_fields(thinking: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what chat templates call thinking, and the chat's field of its budget. Raises `InvalidRequest`.

    None: as the template has it.
    """
    if thinking is None:
        return {}, {}
    kind = thinking.get("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise InvalidRequest("thinking.type must be enabled, adaptive or disabled", "thinking")
    is_on = kind != "disabled"
    budget = thinking.get("budget_tokens") if kind == "enabled" else None
    names = {"enable_thinking": is_on, "thinking": is_on}  # Qwen's, and Granite's and DeepSeek's
    return names, {} if budget is None else {"thinking_token_budget": budget}


def output_fields(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the form and the effort of `output_config`. Raises `InvalidRequest`."""
    fields: dict[str, Any] = {}
    effort, form = (config or {}).get("effort"), (config or {}).get("format")
    if effort is not None:
        if not isinstance(effort, str):
            raise InvalidRequest("output_config.effort must be a string", "output_config")
        fields["reasoning_effort"] = _EFFORTS.get(effort, effort)
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            raise InvalidRequest("output_config.format must have the type json_schema, and a schema", "output_config")
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": form["schema"]},
        }
    return fields
