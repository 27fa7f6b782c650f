"""What texts each kind of description admits, and what is refused before any model is asked."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import BaseModel, FilePath

from fakes.byte_tokens import ByteTokens
from outrider.verifier_service.messages.request import SamplingParams, StructuredKind, StructuredOutput
from outrider.verifier_service.messages.structured_output import (
    LIMITS,
    MAX_WARNING_CHARS,
    check_structured,
    embedded_schema,
    grammar_text,
    warning_of,
)
from outrider.verifier_service.messages.wire import decode, encode

EOS = 256
BYTES: LLTokenizer = ByteTokens([b"<eos>", *(bytes([value]) for value in range(256))]).load()
GBNF = 'root ::= "a" b\nb ::= "b" | "c"'


def structured(kind: str, value: object = "") -> StructuredOutput:
    if kind == "choice":
        return StructuredOutput(kind=StructuredKind.CHOICE, choices=tuple(value))
    text = json.dumps(value) if kind == "json_schema" and not isinstance(value, str) else value
    return StructuredOutput(kind=StructuredKind(kind), text=text)


def strictly(schema: object) -> StructuredOutput:
    return replace(structured("json_schema", schema), is_strict=True)


def admits(wanted: StructuredOutput, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar_text(wanted), log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = [value + 1 for value in text.encode()]
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"enum": ["é", 2]}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
ODD_CHOICES = ('a"b', "c\\d", "line\nbreak", "\u2028", "\x01", "é😀", "/x/", "$", "{", "start", "a b")


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (
            structured("json_schema", POINT),
            ['{"x":1,"y":"é"}', '{"x": -12,\n  "y": 2}'],
            ['{"y":2,"x":1}', '{"x":1}', '{"x":1.5,"y":2}', '{"x":1,"y":2,"z":3}', "[1]", f'{{"x":{" " * 40}1,"y":2}}'],
        ),
        (structured("json_object"), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", '{"a"}', "{} "]),
        (structured("regex", "^[0-9]{2}-(a|b)$"), ["12-a"], ["12-ab", "x12-a", "1-a"]),
        (
            structured("regex", r"\d{3}-\w+\s[^\d]\\\D"),
            ["123-a_1 x\\x"],
            [3 * "\U0001fbf8" + "-a x\\x", "123-é x\\x", "123-a x\\1"],
        ),
        (structured("grammar", 'start: A | "b" start\nA: /x+/'), ["xx", "bbx"], ["b", "xb"]),
        (structured("grammar", GBNF), ["ab", "ac"], ["a", "bb"]),
        (structured("choice", ODD_CHOICES), ODD_CHOICES, ['a"', "line", ""]),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_each_kind_admits_what_it_describes(wanted, right, wrong):
    check_structured(wanted)
    assert [text for text in right if not admits(wanted, text)] == []
    assert [text for text in wrong if admits(wanted, text)] == []


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (structured("json_schema", "{bad"), "not JSON"),
        (structured("json_schema", "[" * 100_000), "not JSON"),
        (structured("json_schema", "[1]"), "an object or a boolean"),
        (structured("json_schema", {"type": "nope"}), "Invalid type: nope"),
        (strictly({"not": {}}), 'Unimplemented keys: ."not".'),
        (strictly({"type": "array", "uniqueItems": True}), 'Unimplemented keys: ."uniqueItems".'),
        (strictly({"type": "string", "format": "path"}), "Unknown format: path"),
        (structured("json_schema", {"$dynamicRef": "#a"}), "dynamicRef"),  # not a constraint, but what stands there
        (structured("json_schema", {"type": "object", "properties": {"a": {}}, "minProperties": 2}), "maxProperties"),
        (structured("json_schema", {"$ref": "http://127.0.0.1/x.json"}), "does not fetch"),
        (structured("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}), "Unsatisfiable"),
        (structured("regex", "((("), "invalid regex"),
        (structured("regex", "(?=a)b"), "look-ahead"),
        (structured("grammar", "start: nothing"), "unknown name"),
        (structured("grammar", "%%% ::= x"), "GBNF"),
        (structured("grammar", "a ::= " + "(" * 5000), "GBNF"),
    ],
)
def test_what_cannot_be_followed_is_refused(wanted, reason):
    expected = f"structured must be a {wanted.kind} that can be followed: .*{reason}"
    with pytest.raises(ValueError, match=expected) as raised:
        check_structured(wanted)
    assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kind": StructuredKind.REGEX}, "a regex that is not empty"),
        ({"kind": StructuredKind.REGEX, "text": "a" * 200_000}, "at most 131072 characters"),
        ({"kind": StructuredKind.GRAMMAR, "text": "a" * 600_000}, "at most 524288 characters"),
        ({"kind": StructuredKind.JSON_SCHEMA, "text": "a" * 200_000}, "at most 131072 characters"),
        ({"kind": StructuredKind.CHOICE}, "1 to 1024 texts"),
        ({"kind": StructuredKind.CHOICE, "choices": ("a", "")}, "none of them empty"),
        ({"kind": StructuredKind.CHOICE, "choices": ("a" * 1000,) * 1000}, "at most 131072 characters"),
    ],
)
def test_what_is_no_description_is_refused(fields, reason):
    with pytest.raises(ValueError, match=f"structured must be .*{reason}"):
        StructuredOutput(**fields)


def test_it_crosses_the_wire():
    for wanted in (structured("choice", ODD_CHOICES), structured("json_schema", POINT), None):
        sampling = SamplingParams(structured=wanted)
        assert decode(encode(sampling), (SamplingParams,)) == sampling


NUMBERS = {
    "type": "object",
    "properties": {
        "plain": {"type": ["number", "null"]},
        "listed": {"type": "array", "items": {"type": "integer"}},
        "chosen": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "pointed": {"$ref": "#/$defs/count"},
        "own": {"type": "integer", "minimum": 0, "maximum": 10**18},
    },
    "$defs": {"count": {"type": "integer"}},
}


@pytest.mark.parametrize("field", ["plain", "chosen", "pointed"])
def test_numbers_end_somewhere(field):
    wanted = structured("json_schema", NUMBERS)
    assert admits(wanted, f'{{"{field}": -123456789012345}}')
    assert not admits(wanted, f'{{"{field}": {"1" * 40}}}')
    assert not admits(wanted, f'{{"{field}": 0.{"1" * 40}}}')


def test_numbers_end_in_lists_too_and_bounds_of_the_schema_stay():
    wanted = structured("json_schema", NUMBERS)
    assert admits(wanted, '{"plain": -0.000000001, "listed": [1, -20]}')
    assert not admits(wanted, f'{{"listed": [{"1" * 40}]}}')
    assert admits(wanted, f'{{"own": {10**17}}}')
    assert not admits(wanted, '{"own": -1}')


def test_a_property_may_be_called_as_a_keyword():
    schema = {"type": "object", "properties": {"type": {"type": "string"}, "items": {"type": "number"}}}
    assert admits(structured("json_schema", schema), '{"type": "number", "items": 1.5}')


def test_a_schema_within_a_grammar_is_bounded_too():
    wanted = structured("grammar", f'%llguidance {{}}\nstart: "<" %json {embedded_schema({"type": "integer"})} ">"')
    assert admits(wanted, "<12>")
    assert not admits(wanted, f"<{'1' * 40}>")


def test_a_schema_may_say_what_llamas_grammars_begin_with():
    schema = {"type": "object", "properties": {"a": {"const": "root ::= x"}}, "required": ["a"]}
    wanted = structured("grammar", f"%llguidance {{}}\nstart: %json {embedded_schema(schema)}")
    assert admits(wanted, '{"a": "root ::= x"}')


# --- constraints that the grammar lacks ---


class Part(BaseModel):
    """As pydantic writes it: `uniqueItems`, `propertyNames`, and formats that are not in the standard."""

    tags: set[Literal["a", "b"]]
    counts: dict[Literal["x"], int]
    path: FilePath


NESTED = {
    "$defs": {"set": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True}},
    "type": "object",
    "properties": {
        "defined": {"$ref": "#/$defs/set"},
        "chosen": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer", "not": {"const": 1}}}]},
        "listed": {"type": "array", "items": {"type": "array", "contains": {"const": 1}, "minContains": 2}},
    },
    "required": ["defined", "chosen", "listed"],
    "if": {},
    "then": {},
    "additionalProperties": False,
}
EITHER = {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 1}]}


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        (Part.model_json_schema(), ("propertyNames", "uniqueItems", 'format "file-path"')),
        (NESTED, ("if", "then", "not", "uniqueItems", "contains", "minContains")),
        (EITHER, ("oneOf (followed as anyOf)",)),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
        ({"type": "string", "format": 'o"dd\n'}, (r'format "o\"dd\n"',)),
        (POINT, ()),
        ({"type": "object", "properties": {"uniqueItems": {"type": "boolean"}}}, ()),
    ],
)
def test_what_is_left_out_is_named_and_refused_where_strict(schema: dict[str, object], names: tuple[str, ...]):
    assert sorted(check_structured(structured("json_schema", schema))) == sorted(names)
    if names:
        with pytest.raises(ValueError, match="structured must be a json_schema that can be followed"):
            check_structured(strictly(schema))
    else:
        assert check_structured(strictly(schema)) == ()


def test_all_else_of_the_schema_is_followed():
    wanted = structured("json_schema", NESTED)
    assert admits(wanted, '{"defined": ["a", "a"], "chosen": [1], "listed": [[]]}')
    assert not admits(wanted, '{"defined": ["c"], "chosen": [1], "listed": [[]]}')
    assert not admits(wanted, '{"defined": ["a"], "chosen": ["x"], "listed": [[]]}')
    assert not admits(wanted, '{"defined": ["a"], "chosen": null}')
    assert admits(structured("json_schema", EITHER), '"a"')
    assert not admits(structured("json_schema", EITHER), "1")


def test_a_schemas_own_options_do_not_undo_strict():
    own = {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}
    with pytest.raises(ValueError, match="uniqueItems"):
        check_structured(strictly(own))
    assert check_structured(structured("json_schema", {**own, "x-guidance": {"lenient": False}})) == ("uniqueItems",)


def test_a_schema_within_a_grammar_is_as_lenient():
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    text = "%llguidance {{}}\nstart: %json {}"
    wanted = structured("grammar", text.format(embedded_schema(schema)))
    assert check_structured(wanted) == ("uniqueItems",)
    assert admits(wanted, "[1, 1]")
    with pytest.raises(ValueError, match="uniqueItems"):
        check_structured(structured("grammar", text.format(embedded_schema(schema, is_strict=True))))


def test_a_grammar_that_names_tokens_has_nothing_left_out():
    assert check_structured(structured("grammar", "%llguidance {}\nstart: <[5]>")) == ()


def test_a_warning_names_the_field_and_is_short():
    warning = warning_of("guided_json", ["uniqueItems", 'format "path"'])
    says = "the answer may break what the grammar lacks and leaves out"
    assert warning == f'guided_json: {says}: uniqueItems, format "path"'
    assert len(warning_of("guided_json", ["x" * 60] * 99)) < MAX_WARNING_CHARS + 200
