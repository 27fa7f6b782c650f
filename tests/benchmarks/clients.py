"""`make study NAME=clients ARGS="--url http://127.0.0.1:8000"`: what clients of a running service get.

Burst: so many short chats at once, first of all, for a service that has only just started and may queue few
(`--max-num-seqs 2 --max-queued-requests 4`): what is refused, and how the client's own repeats end. Calls: so many
chats whose `tool_choice` is `required`, greedy, each with drafts and without. Every call must be JSON of its tool's
schema, and both answers the same. Edits: a text to be given back with a change, with the text as `prediction` and
without, greedy: tokens per verification, and tokens per second of one request at a time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import jsonschema
import openai

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.same_tokens import num_identical

PLAIN_WIDTH = 120
MAX_TOKENS = 200  # of a call: the schemas end long before
PLACES = ("Rome", "Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Delhi", "Paris", "Accra", "Hanoi")


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_CITY = {"type": "string", "maxLength": 20}
TOOLS = (
    _tool("weather", "The weather of a city.", city=_CITY, days={"type": "integer", "minimum": 1, "maximum": 14}),
    _tool("flight", "Flights between cities.", origin=_CITY, destination=_CITY, direct={"type": "boolean"}),
    _tool("convert", "Convert money.", amount={"type": "number"}, currency={"enum": ["EUR", "USD", "JPY"]}),
    _tool("remind", "Set reminders.", items={"type": "array", "items": _CITY, "minItems": 1, "maxItems": 3}),
)
QUESTIONS = (
    "What will the weather be in {place} over the next {number} days?",
    "Find me a flight from {place} to Berlin, with at most {number} stops.",
    "How much are {number} euros in {place}?",
    "Remind me to call the hotel in {place} and to buy {number} maps.",
)
TEXTS = (
    "def area(width, height):\n    # The area of a rectangle.\n    return width * height\n\n\n"
    "def volume(width, height, depth):\n    # The volume of a box.\n    return area(width, height) * depth\n",
    "The library opens at nine and closes at six. On Sundays it stays closed. Readers may borrow five books for three "
    "weeks. Whoever brings a book back late pays ten cents a day.",
    '{"name": "lamp", "price": 20, "colours": ["red", "blue"], "size": {"width": 10, "height": 30}, "in_stock": true}',
    "1. Wash the potatoes.\n2. Boil them for twenty minutes.\n3. Peel them while they are warm.\n4. Cut them into "
    "slices.\n5. Add oil, salt and onions.\n",
)
EDITS = ("Repeat this text exactly:\n\n{text}", "Repeat this text, with the first line changed:\n\n{text}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request was answered with."""

    text: str  # its content, or its calls as JSON
    num_tokens: int
    num_drafts: int
    num_accepted: int
    seconds: float


def is_valid(calls: Sequence[dict[str, Any]]) -> bool:
    """Tell whether calls are of the tools and their schemas; none is not."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    try:
        for call in calls:
            jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
    except (ValueError, KeyError, jsonschema.ValidationError):
        return False
    return bool(calls)


def tokens_per_verification(answers: Sequence[Answer]) -> float:
    """Return how many tokens a verification brought, those without a draft included."""
    num_tokens = sum(answer.num_tokens for answer in answers)
    return num_tokens / max(1, num_tokens - sum(answer.num_accepted for answer in answers))


async def ask(client: openai.AsyncOpenAI, model: str, **body: Any) -> Answer:
    """Ask once, greedily."""
    begin_s = time.perf_counter()
    answer = await client.chat.completions.create(model=model, temperature=0, **body)
    seconds = time.perf_counter() - begin_s
    message = answer.choices[0].message
    calls = [{"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or ()]
    speculation = answer.model_extra["metrics"]["speculative_decoding"] or {}
    return Answer(
        text=json.dumps(calls) if calls else message.content or "",
        num_tokens=answer.usage.completion_tokens,
        num_drafts=speculation.get("num_drafts", 0),
        num_accepted=speculation.get("num_accepted_tokens", 0),
        seconds=seconds,
    )


class Refusals:
    """The answers that told a client to come back later, by the seconds they named."""

    def __init__(self) -> None:
        self.retry_after_s: Counter[str] = Counter()

    async def note(self, response: httpx.Response) -> None:
        """Look at an answer, as a hook of the client's."""
        if response.status_code in (429, 503):
            self.retry_after_s[response.headers.get("retry-after", "none")] += 1


async def measure_burst(client: openai.AsyncOpenAI, model: str, refusals: Refusals, num_chats: int) -> list[list[str]]:
    """Return the row of the burst's table."""
    begin_s = time.perf_counter()
    chats = (
        ask(client, model, messages=[{"role": "user", "content": f"Name a city, number {index}."}], max_tokens=10)
        for index in range(num_chats)
    )
    answers = await asyncio.gather(*chats, return_exceptions=True)
    seconds = time.perf_counter() - begin_s
    for failure in (answer for answer in answers if isinstance(answer, BaseException)):
        if not isinstance(failure, openai.APIStatusError):
            raise failure
    num_failed = sum(isinstance(answer, openai.APIStatusError) for answer in answers)
    named = sorted(refusals.retry_after_s.items(), key=lambda item: (len(item[0]), item[0]))
    told = ", ".join(f"{value} s ({count})" for value, count in named)
    return [[str(num_chats), f"{seconds:.1f}", str(num_failed), str(refusals.retry_after_s.total()), told]]


async def measure_calls(client: openai.AsyncOpenAI, model: str, num_calls: int, concurrency: int) -> list[list[str]]:
    """Return the rows of the calls' table."""
    gate = asyncio.Semaphore(concurrency)
    listed = json.dumps([tool["function"] for tool in TOOLS])

    async def call(number: int, is_drafted: bool) -> Answer:
        question = QUESTIONS[number % 4].format(place=PLACES[number // 4 % 10], number=2 + number // 40)
        messages = [
            {"role": "system", "content": f"You call functions: {listed}"},
            {"role": "user", "content": question},
        ]
        async with gate:
            return await ask(
                client,
                model,
                messages=messages,
                tools=list(TOOLS),
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=MAX_TOKENS,
                extra_body={"disable_spec_decode": not is_drafted},
            )

    on = await asyncio.gather(*(call(number, True) for number in range(num_calls)))
    off = await asyncio.gather(*(call(number, False) for number in range(num_calls)))
    num_equal = num_identical(*([answer.text for answer in answers] for answers in (on, off)))
    valid = [sum(is_valid(_calls(answer.text)) for answer in answers) for answers in (on, off)]
    return [
        ["drafts", f"{valid[0]} / {num_calls}", f"{num_equal} / {num_calls}", f"{tokens_per_verification(on):.2f}"],
        ["none", f"{valid[1]} / {num_calls}", "", f"{tokens_per_verification(off):.2f}"],
    ]


def _calls(text: str) -> list[dict[str, Any]]:
    try:
        return json.loads(text)
    except ValueError:
        return []


async def measure_edits(client: openai.AsyncOpenAI, model: str) -> list[list[str]]:
    """Return the rows of the edits' table."""
    answers: dict[str, list[Answer]] = {"prediction": [], "no prediction": [], "no drafts": []}
    for text in TEXTS:
        for edit in EDITS:
            body = {"messages": [{"role": "user", "content": edit.format(text=text)}], "max_tokens": 96}
            prediction = {"type": "content", "content": text}
            answers["prediction"].append(await ask(client, model, prediction=prediction, **body))
            answers["no prediction"].append(await ask(client, model, **body))
            off = {"disable_spec_decode": True}
            answers["no drafts"].append(await ask(client, model, extra_body=off, **body))
    expected = [answer.text for answer in answers["no drafts"]]
    return [
        [
            name,
            f"{tokens_per_verification(given):.2f}",
            f"{sum(answer.num_tokens for answer in given) / sum(answer.seconds for answer in given):.0f}",
            f"{num_identical([answer.text for answer in given], expected)} / {len(given)}",
        ]
        for name, given in answers.items()
    ]


async def measure(url: str, num_calls: int, concurrency: int, num_chats: int) -> str:
    """Return the page."""
    refusals = Refusals()
    http_client = openai.DefaultAsyncHttpxClient(event_hooks={"response": [refusals.note]})
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, http_client=http_client) as client:
        model = (await client.models.list()).data[0].id
        burst = await measure_burst(client, model, refusals, num_chats)
        calls = await measure_calls(client, model, num_calls, concurrency)
        edits = await measure_edits(client, model)
    return "\n".join(
        [
            f"{describe_machine()}; {model}",
            "",
            *markdown_table(["chats at once", "seconds", "failed", "refusals", "Retry-After"], burst, num_left=0),
            "",
            *markdown_table(
                ["required calls", "valid", "the same without drafts", "tokens / verification"], calls, num_left=1
            ),
            "",
            *markdown_table(
                ["edits", "tokens / verification", "tokens/s", "text as without drafts"], edits, num_left=1
            ),
        ]
    )


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True)
@click.option("--num-calls", type=click.IntRange(1, 400), default=200, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=8, show_default=True)
@click.option("--num-chats", type=click.IntRange(1, 1024), default=16, show_default=True, help="Of the burst.")
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def clients(url: str, num_calls: int, concurrency: int, num_chats: int, markdown_file: Path | None) -> None:
    """Flood a running service, and have it call tools and edit texts, with drafts and without."""
    page = asyncio.run(measure(url, num_calls, concurrency, num_chats))
    console_of(PLAIN_WIDTH).print(page, highlight=False)
    if markdown_file is not None:
        markdown_file.write_text(f"{page}\n")
