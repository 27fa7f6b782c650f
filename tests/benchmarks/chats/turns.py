"""`make study NAME=turns ARGS="--url http://127.0.0.1:8000"`: what it brings to prefill the next turn.

The service: `outrider serve smollm2 --next-turn-prefill --reasoning-parser qwen3 --speculation off`. Each
conversation has two greedy turns, and is held three times, in turn: with the prefill, without and without again (the
placebo). A request with `store: false` goes without, and without look-ups nothing else is different. Between the turns
the client waits for half a second. Kinds: an answer that the client sends back as it was; and one before which the
model thinks, so that the template writes the answer in a place where it was not computed.

Load: so many clients talk without a pause, with the prefill, without and without again: what their streams get.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.same_tokens import first_difference

PLAIN_WIDTH = 120
ARMS = ("with", "without", "placebo")
THINKING_S = 0.5  # between two turns
TOPICS = (
    "tea",
    "rivers",
    "bridges",
    "bread",
    "the moon",
    "bicycles",
    "maps",
    "glass",
    "bees",
    "clocks",
    "salt",
    "chess",
)
QUESTIONS = ("Tell me about {topic}, please.", "What should a child know about {topic}?")
THOUGHT = r"<think>\n[A-Za-z ,.]{60,80}\n</think>\n\n[A-Za-z ,.]{600,620}"
KINDS: dict[str, dict[str, Any]] = {
    "plain, 40 tokens": {"max_tokens": 40},
    "thinks, then 600 characters": {"structured_outputs": {"regex": THOUGHT}},
}


@dataclass(slots=True)
class Reply:
    """One streamed answer."""

    ttft_s: float = 0.0
    seconds: float = 0.0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between two events with tokens
    num_prompt: int = 0
    num_cached: int = 0


async def ask(client: httpx.AsyncClient, arm: str, messages: Sequence[dict[str, str]], **body: Any) -> Reply:
    """Stream one greedy answer."""
    fields = {"messages": list(messages), "temperature": 0, "stream": True, "return_token_ids": True, **body}
    fields["stream_options"] = {"include_usage": True}
    if arm != "with":
        fields["store"] = False
    reply, begin_s, last_s = Reply(), time.perf_counter(), None
    async with client.stream("POST", "/v1/chat/completions", json=fields) as stream:
        if stream.status_code != 200:
            raise click.ClickException((await stream.aread()).decode())
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            for choice in event["choices"]:
                if ids := choice.get("token_ids"):
                    now_s = time.perf_counter()
                    reply.ttft_s = reply.ttft_s or now_s - begin_s
                    reply.gaps_s += [] if last_s is None else [now_s - last_s]
                    last_s = now_s
                    reply.token_ids += ids
                reply.text += choice["delta"].get("content") or ""
            if usage := event.get("usage"):
                reply.num_prompt = usage["prompt_tokens"]
                reply.num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    reply.seconds = time.perf_counter() - begin_s
    return reply


async def converse(client: httpx.AsyncClient, arm: str, kind: str, salt: str, number: int) -> tuple[Reply, Reply]:
    """Hold one conversation of two turns; return both answers."""
    topic = TOPICS[number % len(TOPICS)]
    question = QUESTIONS[number // len(TOPICS) % len(QUESTIONS)].format(topic=topic)
    messages = [{"role": "user", "content": question}]
    first = await ask(client, arm, messages, cache_salt=salt, **{"max_tokens": 600, **KINDS[kind]})
    await asyncio.sleep(THINKING_S)
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Say that in one sentence."}]
    return first, await ask(client, arm, messages, cache_salt=salt, max_tokens=8)


async def measure_turns(client: httpx.AsyncClient, num_conversations: int) -> tuple[list[list[str]], int]:
    """Return a row per kind and arm, and the number of conversations in which the arms' tokens differ."""
    rows, salts, num_other = [], itertools.count(), 0
    for kind in KINDS:
        held: dict[str, list[tuple[Reply, Reply]]] = {arm: [] for arm in ARMS}
        for number in range(num_conversations):
            for arm in random.Random(number).sample(ARMS, k=len(ARMS)):
                held[arm].append(await converse(client, arm, kind, f"{time.time_ns()}-{next(salts)}", number))
        for three in zip(*held.values(), strict=True):
            one, *others = ([*first.token_ids, -1, *second.token_ids] for first, second in three)
            num_other += any(first_difference(other, one) is not None for other in others)
        rows += [_turns_row(kind, arm, held[arm], held["without"]) for arm in ARMS]
    return rows, num_other


def _turns_row(
    kind: str, arm: str, held: Sequence[tuple[Reply, Reply]], without: Sequence[tuple[Reply, Reply]]
) -> list[str]:
    ttfts_ms = [1000.0 * second.ttft_s for _, second in held]
    gains_ms = [1000.0 * (b.ttft_s - a.ttft_s) for (_, a), (_, b) in zip(held, without, strict=True)]
    low, high = interval(gains_ms)
    left = [second.num_prompt - second.num_cached for _, second in held]
    return [
        kind,
        arm,
        f"{statistics.median(second.num_prompt for _, second in held):.0f}",
        f"{statistics.median(left):.0f}",
        f"{statistics.median(ttfts_ms):.0f}",
        "" if arm == "without" else f"{statistics.median(gains_ms):+.0f} ({low:+.0f} … {high:+.0f})",
    ]


def interval(values: Sequence[float], num_draws: int = 2000) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(num_draws))
    return medians[int(0.025 * num_draws)], medians[int(0.975 * num_draws)]


async def measure_load(client: httpx.AsyncClient, num_clients: int, num_rounds: int) -> list[list[str]]:
    """Return a row per arm of what busy clients get; arms take turns, `num_rounds` times."""
    replies: dict[str, list[Reply]] = {arm: [] for arm in ARMS}
    seconds = dict.fromkeys(ARMS, 0.0)
    for number in range(num_rounds):
        for arm in random.Random(number).sample(ARMS, k=len(ARMS)):
            begin_s = time.perf_counter()
            talks = (_talk(client, arm, f"{time.time_ns()}-{place}", place) for place in range(num_clients))
            replies[arm] += itertools.chain.from_iterable(await asyncio.gather(*talks))
            seconds[arm] += time.perf_counter() - begin_s
            await asyncio.sleep(THINKING_S)  # what still waits to be prefilled is no part of the next arm
    return [_load_row(arm, replies[arm], seconds[arm]) for arm in ARMS]


async def _talk(client: httpx.AsyncClient, arm: str, salt: str, place: int) -> list[Reply]:
    """Hold four turns without a pause."""
    messages: list[dict[str, str]] = []
    replies = []
    for turn in range(4):
        messages.append({"role": "user", "content": QUESTIONS[turn % 2].format(topic=TOPICS[place + turn])})
        replies.append(await ask(client, arm, messages, cache_salt=salt, max_tokens=32, ignore_eos=True))
        messages.append({"role": "assistant", "content": replies[-1].text})
    return replies


def _load_row(arm: str, replies: Sequence[Reply], seconds: float) -> list[str]:
    gaps_ms = sorted(1000.0 * gap for reply in replies for gap in reply.gaps_s)
    ttfts_ms = [1000.0 * reply.ttft_s for reply in replies]
    num_tokens = sum(len(reply.token_ids) for reply in replies)
    return [
        arm,
        str(len(replies)),
        f"{num_tokens / seconds:.1f}",
        f"{statistics.median(ttfts_ms):.0f}",
        f"{statistics.median(gaps_ms):.1f}",
        f"{gaps_ms[int(0.99 * len(gaps_ms))]:.1f}",
    ]


async def measure(url: str, *, num_conversations: int, num_clients: int, num_rounds: int) -> str:
    """Return the tables."""
    async with httpx.AsyncClient(base_url=url, timeout=600.0) as client:
        for _ in range(2):  # warm
            await ask(client, "without", [{"role": "user", "content": "Hello."}], max_tokens=8)
        turns, num_other = await measure_turns(client, num_conversations)
        load = await measure_load(client, num_clients, num_rounds)
    turn_names = ["answer", "arm", "tokens of turn 2", "to compute", "TTFT, ms", "saved, ms (95 %)"]
    load_names = ["arm", "answers", "tokens/s", "TTFT, ms", "between tokens, ms", "the same, 99th percentile"]
    return "\n\n".join(
        [
            str(describe_machine()),
            f"Second turns, medians of {num_conversations} conversations; the arms' tokens differ in {num_other} of "
            f"{len(KINDS) * num_conversations}:",
            "\n".join(markdown_table(turn_names, turns, num_left=2)),
            f"{num_clients} clients without a pause, {num_rounds} times each arm:",
            "\n".join(markdown_table(load_names, load, num_left=1)),
        ]
    )


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="Of the running service.")
@click.option("--conversations", default=20, show_default=True, type=click.IntRange(1), help="Of each kind and arm.")
@click.option("--clients", default=3, show_default=True, type=click.IntRange(1), help="Of the load.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Of the load, each arm.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the page there.")
def turns(url: str, conversations: int, clients: int, rounds: int, output: Path | None) -> None:
    """Hold conversations with a running service, with its next turns prefilled and without."""
    page = asyncio.run(measure(url, num_conversations=conversations, num_clients=clients, num_rounds=rounds))
    if output is not None:
        output.write_text(page + "\n")
    console_of(PLAIN_WIDTH).print(page, highlight=False)
