from __future__ import annotations

import pytest

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.replies.tools import MAX_TOOLS, Tool, read_tool_use


def function(name="f", **fields):
    return {"type": "function", "function": {"name": name, **fields}}


def test_tools_are_offered_unless_told_otherwise():
    use = read_tool_use([function("f", description="d", strict=True), function("g")], None, None)
    assert (use.need, use.only, use.is_parallel) == ("auto", None, True)
    assert [tool.name for tool in use.callable_tools] == ["f", "g"]
    assert [tool.is_strict for tool in use.tools] == [True, False]
    assert use.tools[0].as_template_input()["function"] == {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("none", []),
        ("auto", ["f", "g"]),
        ("required", ["f", "g"]),
        ({"type": "function", "function": {"name": "g"}}, ["g"]),
        ({"type": "function", "name": "g"}, ["g"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("g")]}}, ["g"]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, ["f"]),
    ],
)
def test_a_choice_says_what_may_be_called(choice, names):
    use = read_tool_use([function("f"), function("g")], choice, False)
    assert [tool.name for tool in use.callable_tools] == names
    assert not use.is_parallel


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_tools_there_is_nothing_to_call(choice):
    assert read_tool_use([], choice, None).callable_tools == ()


def test_a_schema_without_a_type_is_an_objects():
    use = read_tool_use([function(parameters={"properties": {"a": {}}})], None, None)
    assert use.tools == (Tool(name="f", parameters={"type": "object", "properties": {"a": {}}}),)


@pytest.mark.parametrize(
    ("tools", "choice", "field", "says"),
    [
        ([3], None, "tools", "tools[0] must be an object"),
        ([{"type": 3}], None, "tools", "tools[0].type must be a string"),
        ([function(), {"type": "function"}], None, "tools", "tools[1].function must be an object"),
        ([{"type": "web_search"}], "required", "tool_choice", "needs tools"),
        ([function("a" * 129)], None, "tools", "tools[0].function.name"),
        ([function("a b")], None, "tools", "tools[0].function.name"),
        ([function(None)], None, "tools", "tools[0].function.name"),
        ([function(parameters={"type": "string"})], None, "tools", "tools[0].function.parameters"),
        ([function(description=3)], None, "tools", "tools[0].function.description"),
        ([function(), function()], None, "tools", "'f' is there twice"),
        ([function(f"f{index}") for index in range(MAX_TOOLS + 1)], None, "tools", "at most"),
        ([], "required", "tool_choice", "needs tools"),
        ([function(strict="yes")], None, "tools", "strict must be a boolean"),
        ([function("weather")], {"type": "function", "function": {"name": "wether"}}, "tool_choice", "weather"),
        ([function()], "any", "tool_choice", "none, auto, required"),
        ([function()], {"type": "allowed_tools"}, "tool_choice", "none, auto, required"),
    ],
)
def test_what_is_wrong_is_named(tools, choice, field, says):
    with pytest.raises(InvalidRequest) as refused:
        read_tool_use(tools, choice, None)
    assert refused.value.field == field
    assert says in str(refused.value)


def test_tools_that_are_no_functions_are_left_out_and_named():
    tools = [{"type": "web_search"}, function(), {"type": "custom", "custom": {"name": "p"}}, {"type": "web_search"}]
    use = read_tool_use(tools, None, None)
    assert [tool.name for tool in use.tools] == ["f"]
    assert use.warnings == ("tools: left out, since only functions are served here: web_search, custom",)
    assert read_tool_use([function()], None, None).warnings == ()
    assert read_tool_use([{"type": "web_search"}], None, None).need == "none"


def test_a_tool_may_have_its_fields_beside_its_type():
    use = read_tool_use([{"type": "function", "name": "f", "parameters": {"type": ["object"]}}], None, None)
    assert use.tools == (Tool(name="f", parameters={"type": "object"}),)
