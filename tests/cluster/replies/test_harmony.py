"""What gpt-oss says, split up: thoughts, an answer, calls and what is said before them; in pieces, and broken."""

from __future__ import annotations

import json

import pytest

from outrider.cluster.replies.reader import ReplyPart, ReplySyntax, joined
from outrider.cluster.replies.tools import ToolUse, read_tool_use

SYNTAX = ReplySyntax(tool_call_parser="openai", reasoning_parser="openai_gptoss")
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
NONE, AUTO = read_tool_use([], None, None), read_tool_use(TOOLS, "auto", None)
REQUIRED = read_tool_use(TOOLS, "required", None)
THOUGHT = "<|channel|>analysis<|message|>Rome, I think.<|end|>"
ANSWER = "<|start|>assistant<|channel|>final<|message|>It is Rome."
PREAMBLE = "<|start|>assistant<|channel|>commentary<|message|>I look it up."
CALL = '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rom"}'


def read(text: str, use: ToolUse = AUTO, *, size: int, is_constrained: bool = False) -> ReplyPart:
    reader = SYNTAX.reader("<|start|>user<|message|>?<|end|><|start|>assistant", use, is_constrained=is_constrained)
    assert reader is not None
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return joined([reader.read([piece], is_last=False) for piece in pieces] + [reader.read([], is_last=True)])


def calls_of(part: ReplyPart) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in part.calls]


@pytest.mark.parametrize("size", [1, 3, 500])
def test_a_thought_and_an_answer(size: int) -> None:
    for text in (THOUGHT + ANSWER, THOUGHT + ANSWER + "<|return|>"):
        part = read(text, NONE, size=size)
        assert (part.reasoning, part.content, part.calls) == ("Rome, I think.", "It is Rome.", ())


@pytest.mark.parametrize("size", [1, 3, 500])
def test_an_answer_without_a_thought(size: int) -> None:
    part = read(ANSWER.removeprefix("<|start|>assistant"), size=size)
    assert (part.reasoning, part.content) == ("", "It is Rome.")


@pytest.mark.parametrize("size", [1, 3, 500])
def test_calls_after_a_thought_and_a_preamble(size: int) -> None:
    for end in ("", "<|call|>"):
        part = read(THOUGHT + PREAMBLE + "<|end|>" + CALL + end, size=size)
        assert (part.reasoning, part.content) == ("Rome, I think.", "I look it up.")
        assert calls_of(part) == [("weather", {"city": "Rom"})]


@pytest.mark.parametrize("size", [1, 3, 500])
def test_several_thoughts_and_a_recipient_before_its_channel(size: int) -> None:
    more = "<|start|>assistant<|channel|>analysis<|message|>Or not.<|end|>"
    other = "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    part = read(THOUGHT + more + CALL + "<|call|>" + other, size=size)
    assert part.reasoning == "Rome, I think.Or not."
    assert calls_of(part) == [("weather", {"city": "Rom"}), ("now", {})]


@pytest.mark.parametrize("size", [1, 500])
def test_a_forced_call_is_streamed(size: int) -> None:
    text = CALL.removeprefix("<|start|>assistant") + "<|call|>"
    assert calls_of(read(text, REQUIRED, size=size, is_constrained=True)) == [("weather", {"city": "Rom"})]


def test_a_call_that_is_no_json_is_text() -> None:
    part = read(THOUGHT + CALL[:-1] + "<|call|>", size=3)
    assert not part.calls
    assert '{"city": "Rom"' in part.content
