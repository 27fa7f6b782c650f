"""The fields of a body beside its history, as a chat's."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.api.anthropic.options import output_fields, thinking_fields, tool_fields
from outrider.cluster.common.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
READ = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": SCHEMA}}


def test_tools_are_functions_and_those_of_anthropics_servers_are_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    custom = {**TOOL, "name": "other", "type": "custom", "strict": True, "defer_loading": True}
    fields, left_out = tool_fields([TOOL, search, custom], None)
    strict = {**READ["function"], "name": "other", "strict": True}
    assert fields == {"tools": [READ, {"type": "function", "function": strict}]}
    assert left_out == ["web_search_20250305"]
    assert tool_fields([search], None) == ({}, ["web_search_20250305"])


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "x"}, {"tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ({"type": "auto", "disable_parallel_tool_use": False}, {"tool_choice": "auto"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
    ],
)
def test_choices_of_tools_have_other_names(choice: dict[str, Any], fields: dict[str, Any]) -> None:
    assert tool_fields([], choice)[0] == fields


def test_thinking_is_what_templates_call_it() -> None:
    on, off = ({"enable_thinking": is_on, "thinking": is_on} for is_on in (True, False))
    assert thinking_fields(None) == ({}, {})
    assert thinking_fields({"type": "enabled", "budget_tokens": 1024}) == (on, {"thinking_token_budget": 1024})
    assert thinking_fields({"type": "adaptive", "display": "omitted"}) == (on, {})
    assert thinking_fields({"type": "disabled"}) == (off, {})


def test_an_outputs_form_and_effort_are_a_chats() -> None:
    form = {"type": "json_schema", "schema": SCHEMA}
    assert output_fields({"effort": "max", "format": form, "task_budget": {}}) == {
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}},
    }
    assert output_fields({"effort": "low"}) == {"reasoning_effort": "low"}
    assert output_fields(None) == {}


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: tool_fields(["x"], None), "tools"),
        (lambda: tool_fields([{"name": "x"}], None), "tools"),
        (lambda: tool_fields([], {"type": "some"}), "tool_choice"),
        (lambda: tool_fields([], {"type": "tool"}), "tool_choice"),
        (lambda: thinking_fields({"type": "on"}), "thinking"),
        (lambda: output_fields({"effort": 3}), "output_config"),
        (lambda: output_fields({"format": {"type": "text"}}), "output_config"),
        (lambda: output_fields({"format": {"type": "json_schema"}}), "output_config"),
    ],
)
def test_what_is_wrong_is_named(call: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        call()
    assert refused.value.field == field
