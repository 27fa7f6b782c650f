"""`outrider bench serve`: load a running server at several points and measure what its clients see."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from outrider.cluster.client.openai_client import Server, ServerError, first_model, open_client, stream_events
from outrider.cluster.offline.prompts import PromptError, read_prompt_lines
from outrider.drafter_service import embedded
from outrider.lab.bench.load import Clock, LoadPoint, LoadTrace, Prompt, Reply, run_load
from outrider.lab.bench.serve_figures import LoadFigures, Slo, figures_of
from outrider.verifier_service.messages.request import SpeculationMetrics

OnPoint = Callable[[LoadPoint], Callable[[], None]]  # told of a point; returns whom to tell of each reply


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchOptions:
    """What to ask and how often. Raises `ValueError` naming the field that is out of range."""

    model: str | None  # None: the first that the server lists
    prompts: tuple[Prompt, ...]  # of one point
    points: tuple[LoadPoint, ...]
    max_tokens: int
    temperature: float
    ignore_eos: bool
    slo: Slo
    seed: int  # of the arrival times
    max_seconds: float  # of one point

    def __post_init__(self) -> None:
        if not self.prompts:
            raise ValueError("prompts: there are none")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        if not self.max_seconds > 0.0:
            raise ValueError("max_seconds must be above 0")

    def body(self, model: str, prompt: Prompt) -> dict[str, Any]:
        fields = {
            "model": model,
            "prompt": prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream_options": {"include_usage": True},
        }
        return fields | ({"ignore_eos": True} if self.ignore_eos else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchResult:
    """Everything a report is made of."""

    url: str
    model: str
    options: ServeBenchOptions
    figures: tuple[LoadFigures, ...]


def read_prompts(path: Path | None, num_prompts: int) -> tuple[Prompt, ...]:
    """Return so many prompts, from the start again where the file has fewer; raises `PromptError` naming the line."""
    path = path or embedded.HERE / "prompts.jsonl"
    prompts = [
        _prompt(line, f"{path}: prompt {number}") for number, line in enumerate(read_prompt_lines(path), start=1)
    ]
    return tuple(itertools.islice(itertools.cycle(prompts), num_prompts))


def _prompt(line: dict[str, Any], place: str) -> Prompt:
    if line.keys() not in ({"prompt"}, {"prompt_token_ids"}):
        raise PromptError(f"{place}: give either prompt or prompt_token_ids, and nothing else")
    (prompt,) = line.values()
    return prompt


def run(server: Server, options: ServeBenchOptions, *, clock: Clock, on_point: OnPoint) -> ServeBenchResult:
    """Measure all points one after another; raises `ServerError` where not even a first request is answered."""
    return asyncio.run(_run(server, options, clock, on_point))


async def _run(server: Server, options: ServeBenchOptions, clock: Clock, on_point: OnPoint) -> ServeBenchResult:
    async with open_client(server) as client:
        model = options.model or await first_model(client)

        async def ask(prompt: Prompt) -> Reply:
            return await stream_reply(client, options.body(model, prompt), clock)

        await _warm_up(ask, options)
        traces = [await _measure(ask, options, point, clock, on_point(point)) for point in options.points]
    figures = tuple(figures_of(trace, options.slo) for trace in traces)
    return ServeBenchResult(url=server.base_url, model=model, options=options, figures=figures)


async def _warm_up(ask: Callable[[Prompt], Any], options: ServeBenchOptions) -> None:
    try:
        async with asyncio.timeout(options.max_seconds):
            reply = await ask(options.prompts[0])
    except TimeoutError as error:
        raise ServerError(f"a first request was not answered within {options.max_seconds:g} s") from error
    if reply.error is not None:
        raise ServerError(f"a first request failed: {reply.error}")


async def _measure(
    ask: Callable[[Prompt], Any],
    options: ServeBenchOptions,
    point: LoadPoint,
    clock: Clock,
    on_reply: Callable[[], None],
) -> LoadTrace:
    return await run_load(
        ask,
        options.prompts,
        point,
        rng=random.Random(options.seed),
        clock=clock,
        max_seconds=options.max_seconds,
        on_reply=on_reply,
    )


async def stream_reply(client: httpx.AsyncClient, body: dict[str, Any], clock: Clock) -> Reply:
    """Ask once and note when the pieces came; an error becomes part of the reply.

    A server that reports no usage is taken to send a token a piece.
    """
    sent_s, times_s = clock(), []
    num_tokens: int | None = None
    drafts, error = SpeculationMetrics(), None
    try:
        async with contextlib.aclosing(stream_events(client, "/v1/completions", body)) as events:
            async for event in events:
                if any(choice.get("text") for choice in event.get("choices", ())):
                    times_s.append(clock())
                num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
                drafts = _drafts(event) or drafts
    except ServerError as failure:
        error = str(failure)
    return Reply(
        sent_s=sent_s,
        chunk_times_s=tuple(times_s),
        ended_s=clock(),
        num_tokens=len(times_s) if num_tokens is None else num_tokens,
        drafts=drafts,
        error=error,
    )


def _drafts(event: dict[str, Any]) -> SpeculationMetrics | None:
    """Read what an Outrider server reports in a request's last chunk."""
    speculation = (event.get("metrics") or {}).get("speculative_decoding")
    if not speculation:
        return None
    names: Sequence[str] = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_empty_rounds")
    return SpeculationMetrics(**{name: speculation.get(name, 0) for name in names})
