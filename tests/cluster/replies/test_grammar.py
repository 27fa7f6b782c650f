"""The grammars of tool calls, followed byte by byte: what must be written is what is read, and nothing else fits."""

from __future__ import annotations

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from fakes.written_calls import written
from outrider.cluster.replies.families import TOOL_FAMILIES
from outrider.cluster.replies.grammar import MAX_CALLS, calls_structure, held_calls
from outrider.cluster.replies.reader import ReplySyntax
from outrider.cluster.replies.tools import MAX_TOOLS, read_tool_use
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput
from outrider.verifier_service.messages.structured_output import check_structured, grammar_text

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
WITH_TRIGGER = [name for name, family in TOOL_FAMILIES.items() if family.written.trigger]


def fits(structure, text):
    matcher = LLMatcher(LLTokenizer("byte"), grammar_text(structure), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def structure_of(family, choice="required", *, parallel=True, instead=None):
    use = read_tool_use(TOOLS, choice, parallel)
    return calls_structure(use, ReplySyntax(tool_call_parser=family), {}, instead)


@pytest.mark.parametrize("family", [None, *TOOL_FAMILIES])
def test_required_calls_fit_and_nothing_else_does(family):
    structure = structure_of(family)
    one, both = [("weather", {"city": "Rom", "days": 3})], [("weather", {"city": "Rom"}), ("now", {})]
    assert fits(structure, written(family, one))
    assert fits(structure, written(family, both))
    assert not fits(structure, "It rains.")
    assert not fits(structure, written(family, [("wether", {"city": "Rom"})]))
    assert not fits(structure, written(family, [("weather", {"days": 3})]))
    assert not fits(structure, written(family, [("weather", {"city": "Roma Termini"})]))


@pytest.mark.parametrize("family", [None, *TOOL_FAMILIES])
def test_what_is_written_is_what_is_read(family):
    calls = [("weather", {"city": "Rom"}), ("now", {})]
    reader = ReplySyntax(tool_call_parser=family).reader(
        "", read_tool_use(TOOLS, "required", None), is_constrained=True
    )
    said = reader.read(written(family, calls), is_last=True)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == calls


def test_a_named_function_is_the_only_one():
    structure = structure_of("hermes", {"type": "function", "function": {"name": "now"}})
    assert fits(structure, written("hermes", [("now", {})]))
    assert not fits(structure, written("hermes", [("weather", {"city": "Rom"})]))


def test_one_call_at_a_time_is_one_call():
    assert not fits(structure_of("hermes", parallel=False), written("hermes", [("now", {}), ("now", {})]))
    assert fits(structure_of("hermes", parallel=False), written("hermes", [("now", {})]))
    assert fits(structure_of("hermes"), written("hermes", [("now", {})] * MAX_CALLS))
    assert not fits(structure_of("hermes"), written("hermes", [("now", {})] * (MAX_CALLS + 1)))


@pytest.mark.parametrize("family", WITH_TRIGGER)
def test_of_its_own_accord_a_model_says_what_it_likes_until_it_calls(family):
    structure = structure_of(family, "auto")
    for text in ("", "It rains.\n", "a < b [TOOL] <tool"):
        assert fits(structure, text)
        assert fits(structure, text + written(family, [("weather", {"city": "Rom"}), ("now", {})]))
        assert not fits(structure, text + written(family, [("weather", {"city": "Rom", "days": "x"})]))
        assert not fits(structure, text + written(family, [("wether", {})]))


@pytest.mark.parametrize("family", [None, "llama3_json", "pythonic"])
def test_calls_without_a_mark_of_their_own_are_not_held_to_a_form(family):
    assert structure_of(family, "auto") is None


def test_a_response_format_holds_for_an_answer_that_calls_nothing():
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    instead = StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=json.dumps(schema))
    structure = structure_of("hermes", "auto", instead=instead)
    assert fits(structure, '{"sum": 3}')
    assert fits(structure, written("hermes", [("now", {})]))
    assert not fits(structure, "It rains.")
    assert structure_of(None, "auto", instead=instead) is None
    regex = StructuredOutput(kind=StructuredKind.REGEX, text="a+")
    assert structure_of("hermes", "auto", instead=regex) is None


LISTS = {"type": "object", "properties": {"cities": {"type": "array", "items": {"const": "a"}, "uniqueItems": True}}}


@pytest.mark.parametrize("family", [None, *TOOL_FAMILIES])
def test_constraints_that_the_grammar_lacks_are_left_out_unless_the_tool_is_strict(family):
    lenient, strict = (
        read_tool_use(
            [{"type": "function", "function": {"name": "f", "parameters": LISTS, "strict": is_strict}}],
            "required",
            None,
        )
        for is_strict in (False, True)
    )
    syntax = ReplySyntax(tool_call_parser=family)
    held = held_calls(lenient, syntax, {})
    structure, left_out = held.structured, held.left_out
    assert left_out == ("uniqueItems",)
    assert fits(structure, written(family, [("f", {"cities": ["a", "a"]})]))
    assert not fits(structure, written(family, [("f", {"cities": ["b"]})]))
    with pytest.raises(ValueError, match=r"f: uniqueItems of /properties/cities: .*uniqueItems"):
        held_calls(strict, syntax, {})


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


def many_tools(number, *, size=120, strict=False, **schema):
    """Return tools as agents bring them: most of their schemas only describes."""
    parameter = {"type": "string", "description": "x" * size, **schema}
    parameters = {"type": "object", "properties": {f"p{index}": parameter for index in range(6)}, "required": ["p0"]}
    return [
        {"type": "function", "function": {"name": f"t{i}", "parameters": parameters, "strict": strict}}
        for i in range(number)
    ]


@pytest.mark.parametrize("need", ["auto", "required"])
@pytest.mark.parametrize("family", [None, *TOOL_FAMILIES])
@pytest.mark.parametrize("number", [15, MAX_TOOLS])
def test_as_many_tools_as_agents_bring_are_held(number, family, need):
    tools = many_tools(number)
    assert number < MAX_TOOLS or len(json.dumps(tools)) > 60 << 10
    held = held_calls(read_tool_use(tools, need, None), ReplySyntax(tool_call_parser=family), {})
    structure, left_out = held.structured, held.left_out
    assert left_out == ()
    if need == "required" or family not in (None, "llama3_json", "openai", "pythonic"):
        assert fits(structure, written(family, [("t3", {"p0": "a", "p5": "b"})]))
        assert not fits(structure, written(family, [("t3", {"p5": "b"})]))
    else:
        assert structure is None


@pytest.mark.parametrize("family", [None, *TOOL_FAMILIES])
def test_a_pattern_that_no_grammar_can_hold_is_left_out_and_all_else_is_held(family):
    parameters = {
        "properties": {"to": {"type": "string", "pattern": EMAIL}, "n": {"type": "integer"}},
        "required": ["to", "n"],
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    syntax = ReplySyntax(tool_call_parser=family)
    held = held_calls(read_tool_use(tools, "required", None), syntax, {})
    structure, left_out = held.structured, held.left_out
    assert left_out == ("pattern of f/properties/to",)
    assert fits(structure, written(family, [("f", {"to": "any", "n": 3})]))
    assert not fits(structure, written(family, [("f", {"to": "any", "n": "x"})]))
    tools[0]["function"]["strict"] = True
    with pytest.raises(ValueError, match=r"can be followed: f: pattern of /properties/to: .*look-ahead"):
        held_calls(read_tool_use(tools, "required", None), syntax, {})


@pytest.mark.parametrize("family", [None, "hermes", "qwen3_coder", "pythonic"])
def test_of_more_than_a_grammar_can_hold_the_largest_schemas_go_first(family):
    choices = [f"choice {index} of many" for index in range(400)]
    tools = many_tools(60, enum=choices) + many_tools(61, size=10)[60:]
    syntax = ReplySyntax(tool_call_parser=family)
    held = held_calls(read_tool_use(tools, "required", None), syntax, {})
    structure, left_out = held.structured, held.left_out
    assert left_out[0].startswith("all of t")
    assert "all of t60" not in left_out
    assert fits(structure, written(family, [("t0", {"p0": "any"})]))
    assert not fits(structure, written(family, [("t60", {"p5": "x"})]))
    strict = many_tools(60, enum=choices, strict=True)
    with pytest.raises(ValueError, match=r"structured must be .+"):
        held_calls(read_tool_use(strict, "required", None), syntax, {})


def test_of_a_schema_that_takes_too_long_to_look_at_the_names_are_left():
    schema = {"type": "string", "pattern": "(?!a)"}
    for depth in range(10):
        schema = {
            "type": "object",
            "properties": {f"p{depth}_{index}": schema for index in range(2)},
            "minProperties": 1,
        }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}, *many_tools(1)]
    held = held_calls(read_tool_use(tools, "required", None), ReplySyntax(tool_call_parser="hermes"), {})
    assert held.left_out == ("all of f",)
    assert fits(held.structured, written("hermes", [("f", {"p9_0": 3, "p9_1": "x"})]))
    assert not fits(held.structured, written("hermes", [("t0", {"p0": 3})]))


def test_a_parameter_whose_name_no_tag_can_have_is_left_out():
    parameters = {"properties": {"a>b": {}, "c": {"type": "integer"}}, "required": ["a>b", "c"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    use = read_tool_use(tools, "required", None)
    held = held_calls(use, ReplySyntax(tool_call_parser="qwen3_coder"), {})
    structure, left_out = held.structured, held.left_out
    assert left_out == ("f/properties/a>b",)
    assert fits(structure, written("qwen3_coder", [("f", {"c": 1})]))


def test_a_strict_form_stays_strict_beside_tools():
    schema = {"type": "array", "uniqueItems": True}
    for is_strict in (False, True):
        instead = StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text=json.dumps(schema), is_strict=is_strict)
        structure = structure_of("hermes", "auto", instead=instead)
        if is_strict:
            with pytest.raises(ValueError, match="uniqueItems"):
                check_structured(structure)
        else:
            assert fits(structure, "[1, 1]")


def test_special_tokens_are_written_by_their_ids():
    use = read_tool_use(TOOLS, "required", None)
    text = calls_structure(use, ReplySyntax(tool_call_parser="mistral"), {"[TOOL_CALLS]": 9, "[ARGS]": 5}).text
    assert text.splitlines()[1].startswith('start: <[9]> "[" call')
    use = read_tool_use(TOOLS, "auto", None)
    text = calls_structure(use, ReplySyntax(tool_call_parser="mistral"), {"[TOOL_CALLS]": 9}).text
    assert "opened: TEXT <[9]>" in text


def test_a_model_may_think_before_it_calls_also_where_special_tokens_mark_its_thoughts():
    syntax = ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3")
    use = read_tool_use(TOOLS, "auto", None)
    call = written("hermes", [("now", {})])
    plain = calls_structure(use, syntax, {})
    assert fits(plain, f"<think>hm</think>{call}")
    special = calls_structure(use, syntax, {"<think>": 7, "</think>": 8})
    assert "thoughts: (TEXT (<[7]> | <[8]>))*" in special.text
    assert fits(special, f"hm {call}")
    assert not fits(special, f"hm {written('hermes', [('weather', {})])}")
    ids = [7, *b"hm", 8, *call.encode()]
    matcher = LLMatcher(LLTokenizer("byte"), grammar_text(special), log_level=0)
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_a_keywords_schema_may_be_a_boolean():
    schema = {"type": "object", "properties": {"a": True, "b": False}, "required": ["a"]}
    use = read_tool_use([{"type": "function", "function": {"name": "f", "parameters": schema}}], "required", None)
    structure = calls_structure(use, ReplySyntax(tool_call_parser="pythonic"), {})
    assert fits(structure, '[f(a=[1, "x"])]')
    assert not fits(structure, "[f(a=1, b=2)]")


def test_keywords_may_all_be_optional():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    use = read_tool_use([{"type": "function", "function": {"name": "f", "parameters": schema}}], "required", None)
    structure = calls_structure(use, ReplySyntax(tool_call_parser="pythonic"), {})
    for text in ("[f()]", "[f(a=1)]", "[f(b=2)]", "[f(a=1, b=2), f()]"):
        assert fits(structure, text)
    for text in ("[f(b=2, a=1)]", "[f(, b=2)]", "[f(c=1)]", "f()"):
        assert not fits(structure, text)
