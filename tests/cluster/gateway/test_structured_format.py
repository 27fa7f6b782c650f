"""Every public spelling of structured output, and the field that an error names."""

from __future__ import annotations

import json

import pytest

from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway.structured_format import OPENAI_FIELDS, openai_structure, structure_of
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput

VLLM = "structured_outputs"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "é"}}}


LACKING = {"type": "array", "uniqueItems": True}


def json_schema(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "kind", "value", "field"),
    [
        ({"response_format": json_schema(SCHEMA)}, StructuredKind.JSON_SCHEMA, SCHEMA, "response_format"),
        ({"response_format": {"type": "json_object"}}, StructuredKind.JSON_OBJECT, "", "response_format"),
        ({VLLM: {"json": SCHEMA}}, StructuredKind.JSON_SCHEMA, SCHEMA, f"{VLLM}.json"),
        ({VLLM: {"json": "{}"}}, StructuredKind.JSON_SCHEMA, {}, f"{VLLM}.json"),
        ({VLLM: {"regex": "a+"}}, StructuredKind.REGEX, "a+", f"{VLLM}.regex"),
        ({VLLM: {"grammar": 'start: "A"'}}, StructuredKind.GRAMMAR, 'start: "A"', f"{VLLM}.grammar"),
        ({VLLM: {"choice": ["a", "b"]}}, StructuredKind.CHOICE, ("a", "b"), f"{VLLM}.choice"),
        ({VLLM: {"json_object": True}}, StructuredKind.JSON_OBJECT, "", f"{VLLM}.json_object"),
        ({"guided_json": SCHEMA}, StructuredKind.JSON_SCHEMA, SCHEMA, "guided_json"),
        ({"guided_json": json.dumps(SCHEMA)}, StructuredKind.JSON_SCHEMA, SCHEMA, "guided_json"),
        ({"guided_regex": "a+"}, StructuredKind.REGEX, "a+", "guided_regex"),
        ({"guided_choice": ["a"]}, StructuredKind.CHOICE, ("a",), "guided_choice"),
        ({"guided_grammar": 'start: "A"'}, StructuredKind.GRAMMAR, 'start: "A"', "guided_grammar"),
        ({"guided_regex": "a+", "response_format": {"type": "text"}}, StructuredKind.REGEX, "a+", "guided_regex"),
    ],
)
def test_what_is_asked_for_is_read(fields, kind, value, field):
    found = openai_structure(fields)
    assert (found.output.kind, found.field) == (kind, field)
    if kind is StructuredKind.CHOICE:
        assert found.output.choices == value
    elif kind is StructuredKind.JSON_SCHEMA:
        assert json.loads(found.output.text) == value
        assert list(json.loads(found.output.text)) == list(value), "the order of properties is that of the text"
    else:
        assert found.output.text == value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict.fromkeys(OPENAI_FIELDS),
        {"response_format": {"type": "text"}},
        {VLLM: {}},
        {VLLM: {"json": None, "json_object": False, "disable_fallback": False, "structural_tag": None}},
    ],
)
def test_nothing_may_be_asked_for(fields):
    assert openai_structure(fields) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": json_schema("{}")}, "response_format"),
        ({"structured_outputs": []}, "structured_outputs"),
        ({VLLM: {"jsn": "{}"}}, "structured_outputs"),
        ({VLLM: {"json": [1]}}, f"{VLLM}.json"),
        ({VLLM: {"regex": 1}}, f"{VLLM}.regex"),
        ({VLLM: {"choice": []}}, f"{VLLM}.choice"),
        ({VLLM: {"choice": "ab"}}, f"{VLLM}.choice"),
        ({VLLM: {"json_object": "yes"}}, f"{VLLM}.json_object"),
        ({VLLM: {"structural_tag": "x"}}, f"{VLLM}.structural_tag"),
        ({VLLM: {"disable_any_whitespace": True}}, f"{VLLM}.disable_any_whitespace"),
        ({VLLM: {"regex": "a", "json": "{}"}}, f"{VLLM}.json"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"response_format": json_schema({"type": "nope"})}, "response_format"),
        ({"response_format": json_schema(LACKING)}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}}, "response_format"),
        ({"guided_json": {"$dynamicRef": "#a"}}, "guided_json"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a" * 20_000}, "guided_regex"),
        ({"guided_json": "x" * 200_000}, "guided_json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, f"{VLLM}.regex"),
    ],
)
def test_an_error_names_its_field(fields, field):
    with pytest.raises(InvalidRequest) as raised:
        openai_structure(fields)
    assert raised.value.field == field
    assert str(raised.value).startswith(field)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": LACKING}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": LACKING, "strict": False}}},
            "response_format",
        ),
        ({VLLM: {"json": LACKING}}, f"{VLLM}.json"),
        ({"guided_json": json.dumps(LACKING)}, "guided_json"),
    ],
)
def test_what_is_left_out_is_told_with_its_field(fields, field):
    found = openai_structure(fields)
    assert not found.output.is_strict
    assert found.warnings == (f"{field}: the answer may break what the grammar lacks and leaves out: uniqueItems",)


def test_what_is_followed_has_no_warning():
    found = openai_structure({"response_format": json_schema(SCHEMA)})
    assert (found.output.is_strict, found.warnings) == (True, ())


def test_one_description_by_its_kind():
    named = structure_of(StructuredKind.REGEX, "a+", "regex")
    assert named.output == StructuredOutput(kind=StructuredKind.REGEX, text="a+")
    assert structure_of(StructuredKind.JSON_OBJECT, False, "json_object") is None


def test_what_no_grammar_can_hold_is_left_out_and_named():
    schema = {"type": "object", "properties": {"to": {"type": "string", "title": "To", "pattern": "(?!a)b"}}}
    found = structure_of(StructuredKind.JSON_SCHEMA, schema, "guided_json")
    assert json.loads(found.output.text) == {"type": "object", "properties": {"to": {"type": "string"}}}
    lacks = "the answer may break what the grammar lacks and leaves out: pattern of /properties/to"
    assert found.warnings == (f"guided_json: {lacks}",)
    with pytest.raises(InvalidRequest, match=r"^guided_json must .* followed: pattern of /properties/to: .*look-ahead"):
        structure_of(StructuredKind.JSON_SCHEMA, schema, "guided_json", is_strict=True)


@pytest.mark.parametrize("kind", [StructuredKind.REGEX, StructuredKind.GRAMMAR])
def test_a_clients_own_grammar_is_short(kind):
    with pytest.raises(InvalidRequest, match="guided_x must be at most 16384 characters"):
        structure_of(kind, "a" * 20_000, "guided_x")
