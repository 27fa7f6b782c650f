"""The `pydantic-ai` package: `speak_pydantic_ai.py URL chat|responses|messages FILE`."""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

import words
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ThinkingPart, ToolCallPart, ToolReturnPart
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from speaking import refusal, report


class Answer(BaseModel):
    number: int


def look(place: str) -> str:
    """Look at a place."""
    return words.FOUND


def model_of(url: str, api: str, name: str = words.MODEL) -> Any:
    """Return the client's model of one of our doors, told that it knows forms of answers."""
    profile = ModelProfile(supports_json_schema_output=True)
    if api == "messages":
        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="k"), profile=profile)
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k"), profile=profile)


URL, API = sys.argv[1:3]
SERVED = model_of(URL, API)
SETTINGS = {"max_tokens": 256}


def first() -> None:
    answer = Agent(SERVED, instructions="Be kind.").run_sync(words.ASK_GREETING, model_settings=SETTINGS)
    assert answer.output == words.GREETING, answer
    assert answer.usage.output_tokens > 3, answer.usage


def streamed() -> None:
    async def run() -> list[str]:
        async with Agent(SERVED).run_stream(words.ASK_GREETING, model_settings=SETTINGS) as stream:
            return [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]

    pieces = asyncio.run(run())
    assert "".join(pieces) == words.GREETING, pieces
    assert len(pieces) > 1, pieces


def parts(prompt: str, **fields: Any) -> tuple[str, list[Any]]:
    answer = Agent(SERVED, **fields).run_sync(prompt, model_settings=SETTINGS)
    return answer.output, [part for message in answer.all_messages() for part in message.parts]


def call() -> None:
    _, found = parts(words.ask_tool(words.TOOL), tools=[look])
    (called,) = [part for part in found if isinstance(part, ToolCallPart)]
    assert (called.tool_name, called.args_as_dict()) == (words.TOOL, words.CALLS[words.TOOL]), called


def result() -> None:
    output, found = parts(words.ask_tool(words.TOOL), tools=[look])
    (returned,) = [part for part in found if isinstance(part, ToolReturnPart)]
    assert (returned.content, output) == (words.FOUND, words.DONE), found


def form() -> None:
    output, _ = parts(words.ASK_FORM, output_type=NativeOutput(Answer))
    assert output == Answer(number=7), output


def reasoning() -> None:
    output, found = parts(words.ASK_THOUGHT)
    (thought,) = [part for part in found if isinstance(part, ThinkingPart)]
    shown = [thought.content, *(thought.provider_details or {}).get("raw_content", ())]  # the latter: of responses
    assert words.THOUGHT in shown, thought
    assert output == words.GREETING, output


def error() -> None:
    asked = ((words.NOBODY, "hi", 404, words.NOBODY), (words.MODEL, words.TOO_LONG, 400, "maximum context length"))
    for name, prompt, status, told in asked:
        other = Agent(model_of(URL, API, name))
        refused = refusal(ModelHTTPError, functools.partial(other.run_sync, prompt, model_settings=SETTINGS))
        assert (refused.status_code, told in str(refused.body)) == (status, True), refused


if __name__ == "__main__":
    report(first, streamed, call, result, form, reasoning, error)
