"""The `langchain-openai` package: `speak_langchain.py URL chat|responses FILE`."""

from __future__ import annotations

import sys
from typing import Any

import openai
import words
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from speaking import refusal, report


class Answer(BaseModel):
    """The answer."""

    number: int


@tool
def look(place: str) -> str:
    """Look at a place."""
    return words.FOUND


URL, API = sys.argv[1:3]


def model(name: str = words.MODEL, **fields: Any) -> ChatOpenAI:
    usual = {"base_url": f"{URL}/v1", "api_key": "k", "max_retries": 0, "max_tokens": 256}
    return ChatOpenAI(model=name, use_responses_api=API == "responses", **usual, **fields)


def first() -> None:
    answer = model().invoke(words.ASK_GREETING)
    assert answer.text == words.GREETING, answer
    assert answer.usage_metadata["output_tokens"] > 3, answer


def streamed() -> None:
    pieces = [chunk.text for chunk in model().stream(words.ASK_GREETING)]
    assert "".join(pieces) == words.GREETING, pieces
    assert sum(map(bool, pieces)) > 1, pieces


def called() -> list[Any]:
    history = [HumanMessage(words.ask_tool(words.TOOL))]
    answer = model().bind_tools([look]).invoke(history)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == (words.TOOL, words.CALLS[words.TOOL]), answer
    return [*history, answer, ToolMessage(look.invoke(call["args"]), tool_call_id=call["id"])]


def call() -> None:
    called()


def result() -> None:
    answer = model().bind_tools([look]).invoke(called())
    assert answer.text == words.DONE, answer


def form() -> None:
    answer = model().with_structured_output(Answer, method="json_schema").invoke(words.ASK_FORM)
    assert answer == Answer(number=7), answer


def reasoning() -> None:
    answer = model(output_version="responses/v1").invoke(words.ASK_THOUGHT)
    assert words.THOUGHT in str(answer.content), answer
    assert answer.text == words.GREETING, answer


def error() -> None:
    unknown = refusal(openai.NotFoundError, lambda: model(words.NOBODY).invoke("hi"))
    assert unknown.code == "model_not_found", unknown
    full = refusal(openai.BadRequestError, lambda: model().invoke(words.TOO_LONG))
    assert full.code == "context_length_exceeded", full


if __name__ == "__main__":
    shown = reasoning if API == "responses" else None  # of chats the client drops it
    report(first, streamed, call, result, form, shown, error)
