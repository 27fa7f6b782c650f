"""The `openai-agents` package: `speak_openai_agents.py URL responses|chat FILE`."""

from __future__ import annotations

import asyncio
import sys

import openai
import words
from agents.items import ReasoningItem, ToolCallItem, ToolCallOutputItem
from pydantic import BaseModel
from speaking import refusal, report

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)


class Answer(BaseModel):
    number: int


@function_tool
def look(place: str) -> str:
    """Look at a place."""
    return words.FOUND


URL, API = sys.argv[1:3]
set_tracing_disabled(True)
KIND = OpenAIResponsesModel if API == "responses" else OpenAIChatCompletionsModel


def agent(model: str = words.MODEL, **fields: object) -> Agent:
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="k", max_retries=0)  # of one loop
    settings = ModelSettings(max_tokens=256)
    served = KIND(model=model, openai_client=client)
    return Agent(name="a", instructions="Be kind.", model=served, model_settings=settings, **fields)


def first() -> None:
    answer = Runner.run_sync(agent(), words.ASK_GREETING)
    assert answer.final_output == words.GREETING, answer


def streamed() -> None:
    async def run() -> list[str]:
        result = Runner.run_streamed(agent(), words.ASK_GREETING)
        events = [event async for event in result.stream_events() if event.type == "raw_response_event"]
        assert result.final_output == words.GREETING, result
        return [event.data.delta for event in events if event.data.type == "response.output_text.delta"]

    pieces = asyncio.run(run())
    assert "".join(pieces) == words.GREETING, pieces
    assert len(pieces) > 1, pieces


def call() -> None:
    items = Runner.run_sync(agent(tools=[look]), words.ask_tool(words.TOOL)).new_items
    (called,) = [item.raw_item for item in items if isinstance(item, ToolCallItem)]
    assert (called.name, called.arguments) == (words.TOOL, '{"place": "note"}'), called


def result() -> None:
    answer = Runner.run_sync(agent(tools=[look]), words.ask_tool(words.TOOL))
    (output,) = [item.output for item in answer.new_items if isinstance(item, ToolCallOutputItem)]
    assert (output, answer.final_output) == (words.FOUND, words.DONE), answer


def form() -> None:
    answer = Runner.run_sync(agent(output_type=Answer), words.ASK_FORM)
    assert answer.final_output == Answer(number=7), answer


def reasoning() -> None:
    answer = Runner.run_sync(agent(), words.ASK_THOUGHT)
    thoughts = [item.raw_item for item in answer.new_items if isinstance(item, ReasoningItem)]
    assert words.THOUGHT in str(thoughts), answer.new_items
    assert answer.final_output == words.GREETING, answer


def error() -> None:
    unknown = refusal(openai.NotFoundError, lambda: Runner.run_sync(agent(words.NOBODY), "hi"))
    assert unknown.code == "model_not_found", unknown
    full = refusal(openai.BadRequestError, lambda: Runner.run_sync(agent(), words.TOO_LONG))
    assert full.code == "context_length_exceeded", full


if __name__ == "__main__":
    report(first, streamed, call, result, form, reasoning, error)
