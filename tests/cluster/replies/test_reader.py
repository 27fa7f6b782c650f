"""What families of models say, split up: whole, token by token, and broken."""

from __future__ import annotations

import json

import pytest

from outrider.cluster.replies.reader import ReplySyntax, Thinking
from outrider.cluster.replies.tools import ToolUse, read_tool_use

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
AUTO = read_tool_use(TOOLS, "auto", None)
REQUIRED = read_tool_use(TOOLS, "required", None)
BOTH = [("weather", {"city": "Rom", "days": 3}), ("now", {})]


def deepseek(name):
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


def v3_call(name, arguments):
    return (
        f"{deepseek('tool call begin')}function{deepseek('tool sep')}{name}\n"
        f"```json\n{arguments}\n```{deepseek('tool call end')}"
    )


ANSWERS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "weather", "parameters": {"city": "Rom", "days": 3}}; '
    '{"name": "now", "parameters": {}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rom", "days": 3}}, '
    '{"name": "now", "arguments": {}}]',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rom", "days": 3}}, '
    '{"name": "now", "arguments": {}}]',
    "pythonic": "[weather(city='Rom', days=3), now()]",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRom\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "deepseek_v3": deepseek("tool calls begin")
    + v3_call("weather", '{"city": "Rom", "days": 3}')
    + "\n"
    + v3_call("now", "{}")
    + deepseek("tool calls end"),
    "deepseek_v31": deepseek("tool calls begin")
    + f'{deepseek("tool call begin")}weather{deepseek("tool sep")}{{"city": "Rom", "days": 3}}'
    + deepseek("tool call end")
    + f"{deepseek('tool call begin')}now{deepseek('tool sep')}{{}}{deepseek('tool call end')}"
    + deepseek("tool calls end"),
}


def read(syntax, text, *, use=AUTO, prompt="", size=3):
    """Read a text in pieces: its content, its reasoning, its calls, and how many pieces were thought."""
    reader = syntax.reader(prompt, use, is_constrained=False)
    said = [reader.read([text[at : at + size]], is_last=False) for at in range(0, len(text), size)]
    said.append(reader.read([], is_last=True))
    calls = [(call.name, json.loads(call.arguments)) for part in said for call in part.calls]
    content, reasoning = "".join(part.content for part in said), "".join(part.reasoning for part in said)
    return content, reasoning, calls, sum(part.num_reasoning_tokens for part in said)


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("family", ANSWERS)
def test_every_familys_calls_are_read(family, size):
    content, _, calls, _ = read(ReplySyntax(tool_call_parser=family), ANSWERS[family], size=size)
    assert calls == BOTH
    assert content == ""


def test_mistrals_newer_form_is_read_too():
    text = '[TOOL_CALLS]weather[ARGS]{"city": "Rom", "days": 3}[TOOL_CALLS]now{}'
    assert read(ReplySyntax(tool_call_parser="mistral"), text)[2] == BOTH


def test_text_before_a_call_is_content():
    for family in ("hermes", "mistral", "granite", "qwen3_coder", "deepseek_v3", "deepseek_v31"):
        content, _, calls, _ = read(ReplySyntax(tool_call_parser=family), f"Let me see.\n{ANSWERS[family]}")
        assert (content, calls) == ("Let me see.", BOTH), family


@pytest.mark.parametrize("text", ["", " \n", "hello  world \n", "  a < b, a <tool b", 'say {"name": 1}'])
def test_an_answer_without_calls_is_content_as_it_stands(text):
    for size in (1, 5):
        assert read(ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3"), text, size=size)[0] == text


@pytest.mark.parametrize(
    "text",
    [
        'So: <tool_call>\n{"name": "weather", "argum',
        "So: <tool_call>{broken}</tool_call> and more",
        'So: <tool_call>{"no": "name"}</tool_call> and more',
        "So: <tool_call>3</tool_call>",
        'So: <tool_call>{"name": 3, "arguments": {}}</tool_call> and more',
    ],
)
def test_a_call_that_cannot_be_read_is_content_and_loses_nothing(text):
    for size in (1, 4, 1000):
        assert read(ReplySyntax(tool_call_parser="hermes"), text, size=size) == (text, "", [], 0)


@pytest.mark.parametrize("text", ["[f(1)]", "[f(**x)]", "[f(a=g())]", "[f(a=b)]", "[f(a="])
def test_what_only_looks_pythonic_is_content(text):
    assert read(ReplySyntax(tool_call_parser="pythonic"), text)[0] == text


def test_pythonic_values_may_be_jsons():
    text = '[f(a=true, b=[null, {"c": -1.5}], c=False)]'
    assert read(ReplySyntax(tool_call_parser="pythonic"), text)[2] == [
        ("f", {"a": True, "b": [None, {"c": -1.5}], "c": False})
    ]


@pytest.mark.parametrize("size", [1, 6, 1000])
def test_thoughts_are_split_off(size):
    text = f"<think>\nhm, hm\n</think>\n\nLet me see.\n{ANSWERS['hermes']}"
    syntax = ReplySyntax(tool_call_parser="hermes", reasoning_parser="qwen3")
    content, reasoning, calls, num_thought = read(syntax, text, size=size)
    assert (content, reasoning, calls) == ("Let me see.", "hm, hm", BOTH)
    assert num_thought >= len("hm, hm") // size


def test_a_thought_may_be_opened_by_the_template_or_by_nobody():
    text = "hm</think>Yes."
    assert read(ReplySyntax(reasoning_parser="qwen3"), text, prompt="…<think>\n")[:2] == ("Yes.", "hm")
    assert read(ReplySyntax(reasoning_parser="qwen3"), text)[:2] == (text, "")
    assert read(ReplySyntax(reasoning_parser="deepseek_r1"), text)[:2] == ("Yes.", "hm")


def test_an_unfinished_thought_is_no_content():
    assert read(ReplySyntax(reasoning_parser="mistral"), "[THINK]hm, ")[:2] == ("", "hm,")


def test_what_must_be_called_is_read_without_a_family():
    text = '[{"name": "weather", "arguments": {"city": "Rom", "days": 3}}, {"name": "now", "arguments": {}}]'
    assert read(ReplySyntax(), text, use=REQUIRED)[2] == BOTH


def test_where_there_is_nothing_to_split_nothing_is_read():
    assert ReplySyntax().reader("", AUTO, is_constrained=False) is None
    assert ReplySyntax(tool_call_parser="hermes").reader("", ToolUse(), is_constrained=False) is None
    none = read_tool_use(TOOLS, "none", None)
    assert ReplySyntax(tool_call_parser="pythonic").reader("", none, is_constrained=False) is None
    closed = ReplySyntax(reasoning_parser="deepseek_r1").reader("…<think>\n\n</think>\n\n", AUTO, is_constrained=False)
    assert closed is None


def test_the_tokenizers_own_template_reads_its_answers():
    template = {
        "start_anchor": "<start>",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>", "content_args": {"strip": False}},
            "content": {},
            "tool_calls": {
                "open_pattern": r"<call (?P<name>\w+)>",
                "close": "</call>",
                "content": "json",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    syntax = ReplySyntax(response_template=template)
    text = 'hm</t>So:<call weather>{"city": "Rom", "days": "3"}</call>'
    content, reasoning, calls, _ = read(syntax, text, prompt="a <t> in an earlier turn<start><t>")
    assert (content, reasoning, calls) == ("So:", "hm", BOTH[:1])
    assert syntax.thought_marks == ("<t>", "</t>")
    assert syntax.thinking("a<start><t>", "a") is Thinking.OPEN
    assert syntax.thinking("a<start>", "a") is Thinking.POSSIBLE
    no_marks = {**template, "fields": {**template["fields"], "thinking": {"open_pattern": "<t>", "close": "</t>"}}}
    assert ReplySyntax(response_template=no_marks).thought_marks == ()


def test_an_unknown_parser_is_refused_by_name():
    with pytest.raises(ValueError, match="tool_call_parser must be one of hermes, "):
        ReplySyntax(tool_call_parser="nobody")
    with pytest.raises(ValueError, match="reasoning_parser must be one of deepseek_r1, "):
        ReplySyntax(reasoning_parser="nobody")


def deep(number, opener="[", closer="]"):
    return opener * number + closer * number


ODD_ARGUMENTS = {
    "nested": f'{{"a": {deep(1500)}}}',
    "nested far": f'{{"a": {deep(100_000)}}}',
    "nested objects": '{"a": ' * 1500 + "1" + "}" * 1500,
    "not a number": '{"a": NaN}',
    "infinite": '{"a": [1, -Infinity]}',
    "half a surrogate": '{"a": "\\ud800"}',
    "long number": '{"a": ' + "9" * 5000 + "}",
    "a list": "[1]",
    "a number": "3",
    "text that is no JSON": '"{broken"',
    "text that is no object": '"[1]"',
    "text with what is no number": '"{\\"a\\": NaN}"',
}
IN_FORM = {
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>',
    "llama3_json": '{{"name": "f", "parameters": {}}}',
    "mistral": '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]',
    "granite": '<|tool_call|>[{{"name": "f", "arguments": {}}}]',
}


@pytest.mark.parametrize("size", [997, 10**6])
@pytest.mark.parametrize("family", IN_FORM)
@pytest.mark.parametrize("name", ODD_ARGUMENTS)
def test_arguments_that_are_no_json_of_an_object_are_text(name, family, size):
    text = IN_FORM[family].format(ODD_ARGUMENTS[name])
    content, _, calls, _ = read(ReplySyntax(tool_call_parser=family), text, size=size)
    assert (content, calls) == (text, [])


ODD_PYTHON = {
    "many signs": "[f(a=" + "-" * 7000 + "1)]",
    "nested": f"[f(a={deep(1500)})]",
    "nested far": f"[f(a={deep(100_000)})]",
    "called": "[f(a=" + "g(" * 2000 + ")" * 2000 + ")]",
    "bytes": '[f(a=b"x")]',
    "a set": "[f(a={1, 2})]",
    "complex": "[f(a=1j)]",
    "infinite": "[f(a=1e999)]",
    "half a surrogate": '[f(a="\\ud800")]',
    "a number as a key": "[f(a={(1, 2): 3})]",
    "a null byte": "[f(a='\x00')]",
    "long number": "[f(a=" + "9" * 5000 + ")]",
}


@pytest.mark.parametrize("name", ODD_PYTHON)
def test_odd_python_is_text(name):
    content, _, calls, _ = read(ReplySyntax(tool_call_parser="pythonic"), ODD_PYTHON[name], size=10**6)
    assert (content, calls) == (ODD_PYTHON[name], [])


def test_what_comes_after_a_call_that_cannot_be_read_is_text_too():
    good = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    odd = IN_FORM["hermes"].format('{"a": NaN}')
    content, _, calls, _ = read(ReplySyntax(tool_call_parser="hermes"), f"{good}\n{odd}\n{good}", size=7)
    assert calls == [("f", {})]
    assert content.strip() == f"{odd}\n{good}"


def test_arguments_may_be_json_in_a_text_or_nothing():
    for arguments, value in (('"{\\"a\\": 1}"', {"a": 1}), ("null", {}), ('""', {}), ("{}", {})):
        text = IN_FORM["hermes"].format(arguments)
        assert read(ReplySyntax(tool_call_parser="hermes"), text)[2] == [("f", value)]
