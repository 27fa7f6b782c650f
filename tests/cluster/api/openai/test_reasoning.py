"""Thoughts over HTTP: what the prompt's end says of them, forms behind them, bounds on them, and their two names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fakes.backend import build_tokenizer
from outrider.cluster.replies.reader import ReplySyntax
from outrider.verifier_service.messages.request import FinishReason, StructuredKind
from outrider.verifier_service.messages.thought import Thought
from support.stack import Stack

ASKED = {"role": "user", "content": "what does <think> mean?"}
FORM = {
    "type": "json_schema",
    "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"


class Service:
    """A model that says one text after a prompt that ends with `end`."""

    def __init__(self, text: str, *, end: str = "", **syntax: Any) -> None:
        template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        template += (
            "{% if add_generation_prompt %}[assistant]" + json.dumps(end)[1:-1].replace("\\n", "\n") + "{% endif %}"
        )
        options = {"finish_reason": FinishReason.STOP, "max_model_len": 2048}
        stack = Stack(text, tokenizer=build_tokenizer(template), api={"reply_syntax": ReplySyntax(**syntax)}, **options)
        self.tokenizer, self.backend, self.http = stack.tokenizer, stack.backend, stack.client()

    async def ask(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        body = {"messages": list(messages or (ASKED,)), **fields}
        answer = await self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    async def streamed(self, **fields: Any) -> list[dict[str, Any]]:
        body = {"messages": [ASKED], "stream": True, **fields}
        answer = await self.http.post("/v1/chat/completions", json=body)
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]

    @property
    def thought(self) -> Thought | None:
        return self.backend.requests[-1].sampling.thought


def said(message: dict[str, Any]) -> tuple[str, str]:
    assert message.get("reasoning") == message.get("reasoning_content")
    return message.get("reasoning", ""), message["content"] or ""


PARSERS = ["deepseek_r1", "qwen3"]


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("end", "text", "expected"),
    [
        (OPEN, "hm</think>Yes.", ("hm", "Yes.")),
        ("<think>", "\nhm\n</think>\n\nYes.", ("hm", "Yes.")),
        (OPEN, "<think>\nhm</think>Yes.", ("hm", "Yes.")),
        (OPEN, "hm", ("hm", "")),
        (OPEN + "Okay,", " hm</think>Yes.", ("hm", "Yes.")),
        (CLOSED, "Yes.", ("", "Yes.")),
        ("<think></think>", "Yes.", ("", "Yes.")),
        (CLOSED + "Answer:", "Yes.", ("", "Yes.")),
        (CLOSED, "A <think>mark</think> is text.", ("", "A <think>mark</think> is text.")),
        (CLOSED, "<think>mark</think>", ("", "<think>mark</think>")),
        ("", "<think>hm</think>Yes.", ("hm", "Yes.")),
        ("", "<think>hm</think>Of <think> and </think>.", ("hm", "Of <think> and </think>.")),
        (OPEN, "hm</think>Of <think> and </think>.", ("hm", "Of <think> and </think>.")),
    ],
)
async def test_the_prompts_end_says_whether_a_thought_is_open(parser, end, text, expected):
    service = Service(text, end=end, reasoning_parser=parser)
    assert said(await service.ask()) == expected
    deltas = await service.streamed()
    joined = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning", "content")}
    assert (joined["reasoning"], joined["content"]) == expected


async def test_a_mark_in_the_midst_of_an_answer_is_text():
    text = "The mark <think> opens a thought</think>."
    assert said(await Service(text, reasoning_parser="qwen3").ask()) == ("", text)


@pytest.mark.parametrize(
    ("begun", "text", "expected"),
    [
        ("<think>hm", ", yes</think>Yes.", (", yes", "Yes.")),
        ("<think>hm</think>It", " is.", ("", " is.")),
        ("It", " is <think>.", ("", " is <think>.")),
    ],
)
async def test_a_continued_message_says_itself_whether_it_thinks(begun, text, expected):
    service = Service(text, reasoning_parser="deepseek_r1")
    final = {"role": "assistant", "content": begun}
    assert said(await service.ask(ASKED, final, continue_final_message=True, add_generation_prompt=False)) == expected


@pytest.mark.parametrize("parser", PARSERS)
@pytest.mark.parametrize(
    ("end", "text", "reasoning", "is_open"),
    [
        ("", '{"n": 1}', "", False),
        ("", '<think>hm</think>\n{"n": 1}', "hm", False),
        (OPEN, 'hm</think>\n\n{"n": 1}', "hm", True),
        (CLOSED, '{"n": 1}', "", None),
    ],
)
async def test_a_form_holds_from_the_end_of_the_thought_on(parser, end, text, reasoning, is_open):
    service = Service(text, end=end, reasoning_parser=parser)
    assert said(await service.ask(response_format=FORM)) == (reasoning, '{"n": 1}')
    assert service.backend.requests[0].sampling.structured.kind is StructuredKind.JSON_SCHEMA
    if is_open is None:
        assert service.thought is None
    else:
        assert service.thought == Thought(opening="<think>", closing="</think>", is_open=is_open)


@pytest.mark.parametrize("tool_parser", [None, "hermes", "llama3_json", "pythonic"])
@pytest.mark.parametrize(
    ("end", "before"), [(OPEN, "hm</think>\n\n"), (CLOSED, ""), ("", "<think>hm</think>\n"), ("", "")]
)
async def test_a_call_that_must_be_made_may_follow_a_thought(tool_parser, end, before):
    call = {
        None: '[{"name": "f", "arguments": {}}]',
        "hermes": CALL,
        "llama3_json": '{"name": "f", "parameters": {}}',
        "pythonic": "[f()]",
    }[tool_parser]
    service = Service(before + call, end=end, reasoning_parser="deepseek_r1", tool_call_parser=tool_parser)
    message = await service.ask(tools=TOOLS, tool_choice="required")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]
    assert message["content"] is None
    assert message.get("reasoning") == ("hm" if before else None)
    assert (service.thought is None) == (end == CLOSED)


async def test_what_looks_like_a_call_within_a_thought_is_thought():
    service = Service(f"I could {CALL}</think>{CALL}", end=OPEN, reasoning_parser="qwen3", tool_call_parser="hermes")
    message = await service.ask(tools=TOOLS)
    assert message["reasoning"] == f"I could {CALL}"
    assert len(message["tool_calls"]) == 1
    assert service.thought == Thought(opening="<think>", closing="</think>", is_open=True)


async def test_thoughts_are_bounded_and_left_out_on_request():
    service = Service("hm</think>Yes.", end=OPEN, reasoning_parser="qwen3")
    assert (await service.ask(thinking_token_budget=7))["reasoning"] == "hm"
    assert service.thought == Thought(opening="<think>", closing="</think>", is_open=True, max_tokens=7)
    message = await service.ask(include_reasoning=False)
    assert message["content"] == "Yes."
    assert "reasoning" not in message
    assert "reasoning_content" not in message
    assert not any("reasoning" in delta for delta in await service.streamed(include_reasoning=False))
    assert service.thought is None


@pytest.mark.parametrize(("syntax", "budget"), [({"reasoning_parser": "qwen3"}, -1), ({}, 5)])
async def test_a_bound_that_cannot_be_is_refused_by_name(syntax, budget):
    service = Service("Yes.", **syntax)
    body = {"messages": [ASKED], "thinking_token_budget": budget}
    refused = await service.http.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "thinking_token_budget")


@pytest.mark.parametrize(
    ("parser", "call"), [("hermes", CALL), ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}]')]
)
async def test_where_no_tool_may_be_called_none_is_offered_and_no_call_is_shown(parser, call):
    service = Service(f"So: {call}", tool_call_parser=parser)
    service.tokenizer.chat_template = "{% for t in tools or [] %}<{{ t.function.name }}>{% endfor %}[assistant]"
    message = await service.ask(tools=TOOLS, tool_choice="none")
    assert message["content"] == "So:"
    assert "tool_calls" not in message
    assert service.tokenizer.decode(service.backend.requests[-1].prompt_token_ids) == "[assistant]"
