"""Parameters written as tags, one by one: what the grammar lets through is what is read, of its schema."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from fakes.written_calls import written
from outrider.cluster.replies.grammar import calls_structure
from outrider.cluster.replies.parameters import branches, plain_strings
from outrider.cluster.replies.reader import ReplySyntax
from outrider.cluster.replies.tools import read_tool_use
from outrider.verifier_service.messages.structured_output import grammar_text

CODER = ReplySyntax(tool_call_parser="qwen3_coder")
COLOR = {"$ref": "#/$defs/Color"}
DEFS = {"Color": {"enum": ["red", "dark red"], "type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}


def use_of(schema, *, key="x", required=True):
    parameters = {"properties": {key: schema}, "required": [key] if required else [], "$defs": DEFS}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return read_tool_use([tool], "required", None)


def fits(use, text):
    structure = grammar_text(calls_structure(use, CODER, {}))
    matcher = LLMatcher(LLTokenizer("byte"), structure, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def read(use, text, *, is_constrained=True):
    said = CODER.reader("", use, is_constrained=is_constrained).read(list(text), is_last=True)
    return said.content, [json.loads(call.arguments) for call in said.calls]


def call(text):
    return written("qwen3_coder", [("f", {"x": text})])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "Rom", "Rom"),
        ({"type": "string"}, "", ""),
        ({"type": "string"}, "\n a\n\n", "\n a\n\n"),
        ({"type": "string"}, "größer <b>\n</function>\n</tool_call>\n<parameter=y>\n", None),
        ({"type": "string"}, '"3"', '"3"'),
        ({}, "3", "3"),
        (True, "[3", "[3"),
        ({"type": "string", "maxLength": 5}, "größe", "größe"),
        ({"type": "string", "minLength": 2}, "ab", "ab"),
        ({"enum": ["red", "dark red"]}, "dark red", "dark red"),
        ({"const": "a<b"}, "a<b", "a<b"),
        (COLOR, "red", "red"),
        ({"anyOf": [COLOR, {"type": "null"}]}, "dark red", "dark red"),
        ({"anyOf": [COLOR, {"type": "null"}]}, "null", None),
        ({"type": ["string", "null"], "maxLength": 2}, "null", None),
        ({"type": "integer"}, "-3", -3),
        ({"type": "number"}, "2.5", 2.5),
        ({"type": "boolean"}, "true", True),
        ({"enum": [1, 2, "a"]}, "2", 2),
        ({"enum": [1, 2, "a"]}, '"a"', "a"),
        ({"const": 3}, "3", 3),
        ({"type": "string", "pattern": "^[0-9]+$"}, '"12"', "12"),
        ({"allOf": [{"type": "integer"}]}, "3", 3),
        ({"type": "array", "items": COLOR}, '["red"]', ["red"]),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, '{"a": "</parameter>"}', {"a": "</parameter>"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
    ],
)
def test_what_may_be_written_is_read_as_its_schema_says(schema, text, value):
    use = use_of(schema)
    assert fits(use, call(text))
    expected = text if value is None and text != "null" else value
    assert read(use, f"{call(text)}\n{call(text)}") == ("", [{"x": expected}] * 2)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "a</parameter>b"),
        ({"type": "string", "maxLength": 5}, "größer"),
        ({"type": "string", "maxLength": 20_000}, "<"),
        ({"type": "string", "minLength": 2}, "a"),
        ({"enum": ["red", "dark red"]}, "dark"),
        (COLOR, "blue"),
        ({"anyOf": [COLOR, {"type": "null"}]}, "nul"),
        ({"type": "integer"}, "3.5"),
        ({"type": "integer"}, "three"),
        ({"type": "boolean"}, "True"),
        ({"enum": [1, 2]}, "3"),
        ({"type": "array", "items": COLOR}, '["blue"]'),
        ({"type": "string", "pattern": "^[0-9]+$"}, "12"),
        ({"type": "string", "pattern": "^[0-9]+$"}, '"a"'),
    ],
)
def test_nothing_else_may_be_written(schema, text):
    assert not fits(use_of(schema), call(text))


def test_what_is_required_must_be_there_in_the_schemas_order_and_nothing_else_may():
    properties = {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "integer"}, "no": False}
    parameters = {"type": "object", "properties": properties, "required": ["b", "d"]}
    use = read_tool_use([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required", None)
    for arguments in ({"b": "x", "d": "y"}, {"a": 1, "b": "x", "c": 3, "d": "y"}, {"b": "x", "c": 3, "d": ""}):
        text = written("qwen3_coder", [("f", arguments)])
        assert fits(use, text)
        assert read(use, text)[1] == [arguments]
    for arguments in (
        {},
        {"b": "x"},
        {"d": "y"},
        {"a": 1, "d": "y"},
        {"d": "y", "b": "x"},
        {"b": "x", "d": "y", "e": 1},
    ):
        assert not fits(use, written("qwen3_coder", [("f", arguments)]))
    assert not fits(use, written("qwen3_coder", [("f", {"b": "x", "d": "y", "no": 1})]))


def test_all_may_be_optional():
    use = use_of({"type": "string"}, required=False)
    for text, arguments in ((written("qwen3_coder", [("f", {})]), {}), (call("a"), {"x": "a"})):
        assert fits(use, text)
        assert read(use, text)[1] == [arguments]


def test_a_name_that_no_tag_can_have_is_refused():
    with pytest.raises(ValueError, match="can be followed: a parameter's name cannot stand in a tag: 'a>b'"):
        calls_structure(use_of({}, key="a>b"), CODER, {})


def test_text_that_the_grammar_does_not_hold_is_read_as_far_as_it_goes():
    text = "<tool_call><function=f><parameter=x>3</parameter><parameter=y>\na\n</parameter></function></tool_call>"
    assert read(use_of({"type": "integer"}), text)[1] == [{"x": 3, "y": "a"}]
    assert read(use_of({"type": "integer"}), call("three"))[1] == [{"x": "three"}]
    assert read(use_of({"type": "string", "pattern": "a"}), call("3"))[1] == [{"x": "3"}]


def test_references_that_go_in_circles_end():
    loop = {"$ref": "#/$defs/Loop", "$defs": DEFS}
    assert branches(loop) == [loop]
    assert plain_strings(loop) == []
    nested = {"anyOf": [{"$ref": "#"}, {"type": "string"}]}
    assert plain_strings(nested) == [{"type": "string"}]
