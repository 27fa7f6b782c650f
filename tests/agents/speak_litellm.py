"""The `litellm` package as a client: `speak_litellm.py URL chat|messages FILE`."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
import words
from pydantic import BaseModel
from speaking import refusal, report

TOOL = {
    "type": "function",
    "function": {
        "name": words.TOOL,
        "description": "Look at a place.",
        "parameters": words.TOOL_SCHEMA,
    },
}


class Answer(BaseModel):
    number: int


URL, API = sys.argv[1:3]
PROVIDER, BASE = ("anthropic", URL) if API == "messages" else ("hosted_vllm", f"{URL}/v1")


def ask(messages: str | list[Any], model: str = words.MODEL, **fields: Any) -> Any:
    history = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    usual = {"api_base": BASE, "api_key": "k", "max_retries": 0, "max_tokens": 2048}
    return litellm.completion(model=f"{PROVIDER}/{model}", messages=history, **usual, **fields)


def first() -> None:
    answer = ask(words.ASK_GREETING)
    assert answer.choices[0].message.content == words.GREETING, answer
    assert answer.usage.completion_tokens > 3, answer


def streamed() -> None:
    chunks = list(ask(words.ASK_GREETING, stream=True))
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(pieces) == words.GREETING, pieces
    assert len(pieces) > 1, pieces


def called() -> list[Any]:
    prompt = words.ask_tool(words.TOOL)
    message = ask(prompt, tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, arguments) == (words.TOOL, words.CALLS[words.TOOL]), message
    result = {"role": "tool", "tool_call_id": call.id, "content": words.FOUND}
    return [{"role": "user", "content": prompt}, message, result]


def call() -> None:
    called()


def result() -> None:
    answer = ask(called(), tools=[TOOL])
    assert answer.choices[0].message.content == words.DONE, answer


def form() -> None:
    # the client has a tool of its own for it where the API is Anthropic's
    prompt = words.ask_form_by("json_tool_call") if API == "messages" else words.ASK_FORM
    answer = ask(prompt, response_format=Answer)
    assert Answer.model_validate_json(answer.choices[0].message.content) == Answer(number=7), answer


def reasoning() -> None:
    message = ask(words.ASK_THOUGHT).choices[0].message
    assert (message.reasoning_content, message.content) == (words.THOUGHT, words.GREETING), message


def error() -> None:
    unknown = refusal(litellm.NotFoundError, lambda: ask("hi", words.NOBODY))
    assert words.NOBODY in str(unknown), unknown
    full = refusal(litellm.ContextWindowExceededError, lambda: ask(words.TOO_LONG))
    assert "maximum context length" in str(full), full


if __name__ == "__main__":
    report(first, streamed, call, result, form, reasoning, error)
