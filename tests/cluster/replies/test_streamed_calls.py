"""Calls that a grammar holds, read as they come: over every cut, their pieces are the calls read whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.written_calls import written
from outrider.cluster.replies.families import TOOL_FAMILIES
from outrider.cluster.replies.reader import ReplySyntax, joined
from outrider.cluster.replies.tools import read_tool_use

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "weather_at", "now")]
AUTO = read_tool_use(TOOLS, "auto", None)
REQUIRED = read_tool_use(TOOLS, "required", None)
FAMILIES = [None, *(name for name, family in TOOL_FAMILIES.items() if family.written.is_json)]
NASTY = {"a": '}{"\\', "b": [{"größer": '\\\\"'}, {}], "c": "</tool_call>\n日本", "d": None}
CALLS = [("weather_at", NASTY), ("now", {}), ("weather", {"city": "Rom"})]


def read(family, pieces, *, use=REQUIRED, is_constrained=True):
    """Return what each piece says, and what the end does."""
    reader = ReplySyntax(tool_call_parser=family, reasoning_parser="qwen3").reader(
        "", use, is_constrained=is_constrained
    )
    said = [reader.read([piece], is_last=False) for piece in pieces]
    return [*said, reader.read([], is_last=True)], reader.is_within_call


def shown(said):
    """Return the content and the calls of some parts together, calls as pairs of a name and arguments."""
    whole = joined(said)
    return whole.content, [(call.name, call.arguments) for call in whole.calls]


def texts(calls):
    return [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_at_every_cut_the_pieces_are_the_arguments_as_they_were_generated(family):
    text = written(family, CALLS)
    for cut in range(len(text) + 1):
        assert shown(read(family, [text[:cut], text[cut:]])[0]) == ("", texts(CALLS)), cut
    assert shown(read(family, text)[0]) == ("", texts(CALLS))


@pytest.mark.parametrize("family", FAMILIES)
def test_they_say_what_is_read_when_all_is_there(family):
    calls = [("weather_at", NASTY | {"c": "no mark"}), *CALLS[1:]]  # which would end a call there
    text = written(family, calls)
    slow = joined(read(family, text, is_constrained=False)[0])
    assert [(call.name, json.loads(call.arguments)) for call in slow.calls] == calls
    assert shown(read(family, text)[0])[1] == texts(calls)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_name_comes_first_and_arguments_as_they_come(family):
    said, _ = read(family, written(family, CALLS[:1]))
    pieces = [call for part in said for call in part.calls]
    assert (pieces[0].name, pieces[0].arguments) == ("weather_at", "{")
    assert len(pieces) == len(texts(CALLS)[0][1])  # one a character
    assert all(not piece.name for piece in pieces[1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_cut_off_anywhere_what_was_given_out_stays_and_nothing_is_lost_but_marks(family):
    text = written(family, CALLS[:2])
    for cut in range(len(text)):
        said, is_within = read(family, text[:cut])
        content, calls = shown(said)
        for (name, arguments), (whole_name, whole) in zip(calls, texts(CALLS), strict=False):
            assert name == whole_name
            assert whole.startswith(arguments)
        assert [call for call in calls[:-1] if call not in texts(CALLS)] == []
        assert is_within == bool(calls and calls[-1] != texts(CALLS)[len(calls) - 1])
        assert content in text[:cut]
        assert content == "" or text[:cut].endswith(content)
        if not calls:
            assert content == text[:cut]


@given(st.recursive(st.none() | st.text() | st.floats(allow_nan=False), st.lists, max_leaves=8), st.randoms())
def test_any_arguments_come_through_any_cuts(value, random):
    calls = [("weather", {"a": value}), ("now", {"b": {"c": value}})]
    family = random.choice(FAMILIES)
    text = written(family, calls)
    cuts = sorted(random.choices(range(len(text)), k=6))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert shown(read(family, pieces)[0]) == ("", texts(calls))


def test_thoughts_and_text_may_stand_before():
    text = f"<think>hm</think>See <tool.\n{written('hermes', CALLS)}"
    for cut in range(len(text) + 1):
        said, _ = read("hermes", [text[:cut], text[cut:]], use=AUTO)
        assert shown(said) == ("See <tool.", texts(CALLS))
        assert joined(said).reasoning == "hm"


@pytest.mark.parametrize("text", ["", " \n", "hello  world \n", "a < b, a <tool b", "<tool_call>", "x <tool_call>\n{"])
def test_an_answer_without_calls_is_content_as_it_stands(text):
    for pieces in ([text], list(text)):
        assert shown(read("hermes", pieces, use=AUTO)[0]) == (text, [])


def test_what_is_in_no_form_is_content_from_there_on():
    """No engine writes this, for the grammar is followed: a reader that is wrong about that loses nothing."""
    first, second = written("hermes", CALLS[1:2]), ' then <tool_call>{"name": "now"'
    for pieces in ([first + second], list(first + second)):
        assert shown(read("hermes", pieces, use=AUTO)[0]) == (second, texts(CALLS[1:2]))
    unknown = 'So: <tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>'
    assert shown(read("hermes", unknown, use=AUTO)[0]) == (unknown, [])
