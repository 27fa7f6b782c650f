"""Schemas as tools bring them: what is translated, what only describes, and the smallest part that goes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider.verifier_service.messages.fitted_schema import MAX_PATTERN_SIZE, MAX_TRIED_CHARS, fitted, pattern_size
from outrider.verifier_service.messages.structured_output import fitted_schema


def of(part: Any, **root: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": part}, **root}


def fit(schema: Any, *, is_strict: bool = False) -> tuple[Any, tuple[str, ...]]:
    text, left_out = fitted_schema(json.dumps(schema), is_strict=is_strict)
    return json.loads(text), left_out


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": True, "enum": ["x"]}, {"type": ["string", "null"], "enum": ["x", None]}),
        ({"$ref": "#/$defs/d", "nullable": True}, {"anyOf": [{"$ref": "#/$defs/d"}, {"type": "null"}]}),
        ({"type": "STRING"}, {"type": "string"}),
        ({"type": "dict"}, {"type": "object"}),
        ({"type": "integer", "minimum": 0, "exclusiveMinimum": True}, {"type": "integer", "exclusiveMinimum": 0}),
        ({"type": "integer", "maximum": 9, "exclusiveMaximum": False}, {"type": "integer", "maximum": 9}),
        ({"type": "string", "pattern": r"\Aa\Z"}, {"type": "string", "pattern": "^a$"}),
        ({"type": "string", "pattern": r"\\A[^]\cA"}, {"type": "string", "pattern": r"\\A[\s\S]\x01"}),
        (
            {"type": "string", "title": "A", "description": "d", "default": 3, "examples": [1], "x-y": 1},
            {"type": "string"},
        ),
        ({"type": "string", "minLength": None, "enum": None, "const": None}, {"type": "string", "const": None}),
        ({"properties": {"title": {"type": "string"}}}, {"properties": {"title": {"type": "string"}}}),
        ({"items": [{"type": "string", "title": "x"}, True]}, {"items": [{"type": "string"}, True]}),
        ({"$ref": "#/$defs/d", "description": "d"}, {"$ref": "#/$defs/d"}),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
        ({"allOf": [{"$ref": "#/definitions/e"}]}, {"allOf": [{"$ref": "#/definitions/e"}]}),
    ],
)
def test_other_spellings_are_translated_and_descriptions_dropped(given, held):
    defined = {"$defs": {"d": {"type": "string"}}, "definitions": {"e": {"type": "string"}}}
    schema = of(given, **defined)
    before = json.dumps(schema)
    for is_strict in (False, True):
        assert fit(schema, is_strict=is_strict) == (of(held, **defined), ())
    assert json.dumps(schema) == before


def test_what_draft_3_requires_is_required():
    schema = {"type": "object", "properties": {"a": {"required": True}, "b": {"required": False}}, "required": ["c"]}
    assert fit(schema)[0] == {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["c", "a"]}


@pytest.mark.parametrize(
    ("given", "held", "left_out"),
    [
        (
            {"type": "string", "format": "email", "pattern": "^(?!a)"},
            {"type": "string", "format": "email"},
            "pattern of {}",
        ),
        ({"type": "string", "pattern": "(?<=a)b"}, {"type": "string"}, "pattern of {}"),
        ({"type": "string", "pattern": r"(a)\1"}, {"type": "string"}, "pattern of {}"),
        ({"type": "string", "pattern": r"\bfoo"}, {"type": "string"}, "pattern of {}"),
        ({"type": "string", "pattern": "(?>a)"}, {"type": "string"}, "pattern of {}"),
        ({"type": "string", "pattern": "(("}, {"type": "string"}, "pattern of {}"),
        ({"type": "string", "pattern": "(a{1,1000}){1,1000}"}, {"type": "string"}, "pattern of {}"),
        ({"type": "any"}, {}, "type of {}"),
        ({"type": ["string", 3], "minLength": 2}, {"minLength": 2}, "type of {}"),
        ({"$ref": "#/$defs/nowhere"}, {}, "$ref of {}"),
        ({"$ref": "https://example.com/x.json"}, {}, "$ref of {}"),
        ({"$dynamicRef": "#a", "type": "string"}, {"type": "string"}, "$dynamicRef of {}"),
        ({"patternProperties": {"^(?!x)": {}}, "type": "object"}, {"type": "object"}, "patternProperties of {}"),
        (
            {"type": "object", "properties": {"b": {}}, "minProperties": 1},
            {"type": "object", "properties": {"b": {}}},
            "minProperties of {}",
        ),
        ({"type": "object", "properties": ["b"]}, {"type": "object"}, "properties of {}"),
        ({"type": "string", "minLength": "x"}, {"type": "string"}, "minLength of {}"),
        ({"type": "number", "multipleOf": 0}, {"type": "number"}, "multipleOf of {}"),
        ({"anyOf": 3, "type": "string"}, {"type": "string"}, "anyOf of {}"),
        ("string", {}, "all of {}"),
        (
            {"items": {"pattern": "(?!a)", "type": "string"}, "type": "array"},
            {"items": {"type": "string"}, "type": "array"},
            "pattern of {}/items",
        ),
        (
            {"oneOf": [{"type": "integer"}, {"pattern": "(?!a)", "type": "string"}]},
            {"oneOf": [{"type": "integer"}, {"type": "string"}]},
            "pattern of {}/oneOf/1",
        ),
    ],
)
def test_the_smallest_part_that_no_grammar_can_hold_goes(given, held, left_out):
    schema = of(given, required=["a"])
    name = left_out.format("/properties/a")
    assert fit(schema) == (of(held, required=["a"]), (name,))
    with pytest.raises(ValueError, match="structured must be a json_schema that can be followed: ") as refused:
        fit(schema, is_strict=True)
    reason = str(refused.value).partition(f"followed: {name}: ")[2]
    assert reason


def test_a_definition_loses_its_own_part_and_who_refers_to_it_nothing():
    defined = {"d": {"type": "string", "pattern": "(?!a)", "minLength": 2}, "e": {"$ref": "#/$defs/d"}}
    schema = of({"$ref": "#/$defs/e"}, **{"$defs": defined})
    held = of({"$ref": "#/$defs/e"}, **{"$defs": {"d": {"type": "string", "minLength": 2}, "e": {"$ref": "#/$defs/d"}}})
    assert fit(schema) == (held, ("pattern of /$defs/d",))


def test_several_parts_go_and_all_are_named():
    schema = {"type": "object", "properties": {"a": {"type": "any", "pattern": "(?!a)"}, "b": {"$ref": "#/x"}}}
    held, left_out = fit(schema)
    assert held == {"type": "object", "properties": {"a": {}, "b": {}}}
    assert left_out == ("pattern of /properties/a", "type of /properties/a", "$ref of /properties/b")


@pytest.mark.parametrize("schema", [{"type": "nope"}, {"$dynamicRef": "#a"}, {"$ref": "#/x", "$defs": {"d": {}}}])
def test_a_schema_of_which_nothing_is_left_is_refused(schema):
    with pytest.raises(ValueError, match=r"can be followed: .+ of /: .+"):
        fit(schema)


def test_many_faulty_parts_are_not_tried_for_long():
    part: Any = {"type": "string", "pattern": "(?!a)"}
    schema = of(part, **{"$defs": {}})
    for depth in range(10):
        schema = {
            "type": "object",
            "properties": {f"p{depth}_{index}": schema for index in range(2)},
            "minProperties": 1,
        }
    tried: list[str] = []

    def counted(text: str) -> str | None:
        tried.append(text)
        return "look-ahead" if "(?!a)" in text or "minProperties" in text else None

    assert fitted(schema, counted).left_out
    assert sum(map(len, tried)) < MAX_TRIED_CHARS + 3 * len(json.dumps(schema))


def test_a_pattern_counts_what_is_repeated_within_what_is_repeated():
    assert pattern_size("abc") == 3
    assert pattern_size("a{3}[^]x]{2,5}") == 8
    assert pattern_size("(ab{1,10}){1,20}c") == 221
    assert pattern_size(r"\{(a|b)+\)x{2,}") == 8
    assert pattern_size("^[a-z]{1,64}@[a-z]{1,255}$") < MAX_PATTERN_SIZE < pattern_size("((a{1,99}){1,99}){1,99}")
    assert pattern_size(")(]{") > 0
