"""What texts each kind of description admits, and what is refused before any model is asked."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from fakes.byte_tokens import ByteTokens
from outrider.verifier_service.messages.request import SamplingParams, StructuredKind, StructuredOutput
from outrider.verifier_service.messages.structured_output import LIMITS, check_structured, embedded_schema, grammar_text
from outrider.verifier_service.messages.wire import decode, encode

EOS = 256
BYTES: LLTokenizer = ByteTokens([b"<eos>", *(bytes([value]) for value in range(256))]).load()
GBNF = 'root ::= "a" b\nb ::= "b" | "c"'


def structured(kind: str, value: object = "") -> StructuredOutput:
    if kind == "choice":
        return StructuredOutput(kind=StructuredKind.CHOICE, choices=tuple(value))
    text = json.dumps(value) if kind == "json_schema" and not isinstance(value, str) else value
    return StructuredOutput(kind=StructuredKind(kind), text=text)


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
        (structured("json_schema", {"not": {}}), "Unimplemented keys"),
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
        ({"kind": StructuredKind.REGEX, "text": "a" * 20_000}, "at most 16384 characters"),
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
