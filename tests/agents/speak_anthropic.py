"""The `anthropic` package, as its users have it: `speak_anthropic.py URL messages FILE`."""

from __future__ import annotations

import sys

import anthropic
import words
from pydantic import BaseModel
from speaking import refusal, report

TOOL = {
    "name": words.TOOL,
    "description": "Look at a place.",
    "input_schema": words.TOOL_SCHEMA,
}


class Answer(BaseModel):
    number: int


URL, API = sys.argv[1:3]
CLIENT = anthropic.Anthropic(base_url=URL, api_key="k", max_retries=0)
USUAL = {"model": words.MODEL, "max_tokens": 256}


def asked(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def first() -> None:
    answer = CLIENT.messages.create(messages=asked(words.ASK_GREETING), system="Be kind.", **USUAL)
    assert answer.content[0].text == words.GREETING, answer
    counted = CLIENT.messages.count_tokens(model=words.MODEL, messages=asked(words.ASK_GREETING), system="Be kind.")
    assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens, answer.usage
    assert [model.id for model in CLIENT.models.list()] == [words.MODEL]


def streamed() -> None:
    with CLIENT.messages.stream(messages=asked(words.ASK_GREETING), **USUAL) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == words.GREETING, pieces
    assert len(pieces) > 1, pieces
    assert (final.stop_reason, final.usage.output_tokens > 3) == ("end_turn", True), final


def call() -> tuple[list[dict[str, object]], str]:
    messages = asked(words.ask_tool(words.TOOL))
    answer = CLIENT.messages.create(messages=messages, tools=[TOOL], **USUAL)
    used = answer.content[-1]
    assert (answer.stop_reason, used.name, used.input) == ("tool_use", words.TOOL, words.CALLS[words.TOOL]), answer
    return [*messages, {"role": "assistant", "content": answer.content}], used.id


def result() -> None:
    history, used = call()
    content = [{"type": "tool_result", "tool_use_id": used, "content": words.FOUND}]
    messages = [*history, {"role": "user", "content": content}]
    with CLIENT.messages.stream(messages=messages, tools=[TOOL], **USUAL) as stream:
        assert stream.get_final_text() == words.DONE


def form() -> None:
    answer = CLIENT.messages.parse(messages=asked(words.ASK_FORM), output_format=Answer, **USUAL)
    assert answer.parsed_output == Answer(number=7), answer


def reasoning() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    answer = CLIENT.messages.create(
        messages=asked(words.ASK_THOUGHT), thinking=thinking, model=words.MODEL, max_tokens=2048
    )
    thought, text = answer.content
    assert (thought.thinking, text.text) == (words.THOUGHT, words.GREETING), answer


def error() -> None:
    messages = CLIENT.messages
    unknown = refusal(
        anthropic.NotFoundError,
        lambda: messages.create(model=words.NOBODY, max_tokens=8, messages=asked("hi")),
    )
    assert words.NOBODY in unknown.message, unknown
    full = refusal(anthropic.BadRequestError, lambda: messages.create(messages=asked(words.TOO_LONG), **USUAL))
    assert "prompt is too long" in full.message, full


if __name__ == "__main__":
    report(first, streamed, call, result, form, reasoning, error)
