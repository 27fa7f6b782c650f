"""`make study NAME=step`: a load step on a running server: one stream, then many, then one, speculation off and on.

    phase            before       load (all that join send one request after another)   after
    requests at a time  1 ------------------------- N --------------------------------- 1

Beside the requests `/load` is read a few times a second: price, draft length and the reasons of the router's decisions.
The load ends as a crowd leaves: all its streams are broken off at once.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from outrider.cluster.client.openai_client import Server, ServerError, first_model, open_client
from outrider.cluster.common.server_options import CONTEXT_SETTINGS, server_options
from outrider.lab.bench.figures import added, percentile
from outrider.lab.bench.load import Ask, Clock, Prompt, Reply
from outrider.lab.bench.serve import read_prompts, stream_reply
from outrider.lab.report import files, show_page
from outrider.verifier_service.messages.request import SpeculationMetrics

PLAIN_WIDTH = 160

SAMPLE_INTERVAL_S = 0.25
RECOVERED_SHARE = 0.9  # of the draft length before the load
RECOVERED_FOR_S = 1.0  # so long drafts must then stay as long, in the mean
BEFORE, LOAD, AFTER = "before", "load", "after"
PHASES = (BEFORE, LOAD, AFTER)

ReadLoad = Callable[[], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The step."""

    concurrency: int = 64
    alone_s: float = 8.0  # before and after
    load_s: float = 12.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What `/load` said: the verifiers' means, and how often each decision was taken since the sample before."""

    time_s: float  # since the begin, when the router said it: a gateway passes on what may be half a second old
    phase: str  # when it was read
    num_running: int
    price: float | None
    num_asks: int  # since the verifiers' start: decisions how much to draft next, one per decoding request and step
    num_asked_tokens: int
    decisions: Mapping[str, int]  # by reason; "on: …" where speculation is on


@dataclass(slots=True)
class StepTrace:
    """One run of the step."""

    samples: list[Sample] = field(default_factory=list)
    replies: dict[str, list[Reply]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    load_ended_s: float = 0.0

    @property
    def errors(self) -> list[str]:
        return [reply.error for replies in self.replies.values() for reply in replies if reply.error is not None]

    def first_tokens_s(self, phase: str) -> list[float]:
        """Return the times to first token of a phase's requests."""
        return [reply.chunk_times_s[0] - reply.sent_s for reply in self.replies[phase] if reply.chunk_times_s]

    def drafts(self, phase: str) -> SpeculationMetrics:
        return added(reply.drafts for reply in self.replies[phase])

    def draft_length(self, phase: str) -> float:
        """Return the mean draft length asked for in a phase, its first second left out."""
        of_phase = [sample for sample in self.in_order() if sample.phase == phase]
        settled = [sample for sample in of_phase if sample.time_s >= of_phase[0].time_s + 1.0]
        return draft_length_between(settled[0], settled[-1]) if settled else 0.0

    def in_order(self) -> list[Sample]:
        """Return the samples by when they were so: what a gateway knows may be older than what it knew before."""
        return sorted(self.samples, key=lambda sample: sample.time_s)

    @property
    def recovery_s(self) -> float | None:
        """Return how long after the load's end drafts were as long as before; None: they never were.

        That is seen at a sample: since the one before it they were, and in the mean of the time from there on.
        """
        wanted = RECOVERED_SHARE * self.draft_length(BEFORE)
        after = [sample for sample in self.in_order() if sample.time_s >= self.load_ended_s]
        for place, (first, seen) in enumerate(itertools.pairwise(after)):
            last = next((later for later in after[place:] if later.time_s >= first.time_s + RECOVERED_FOR_S), None)
            if last is not None and min(draft_length_between(first, end) for end in (seen, last)) >= wanted > 0.0:
                return seen.time_s - self.load_ended_s
        return None


def draft_length_between(first: Sample, last: Sample) -> float:
    """Return the draft tokens asked for per decoding request and step between two samples; 0 where none decoded."""
    return (last.num_asked_tokens - first.num_asked_tokens) / max(1, last.num_asks - first.num_asks)


async def run_step(
    ask: Ask, read_load: ReadLoad, prompts: Sequence[Prompt], options: StepOptions, *, clock: Clock
) -> StepTrace:
    """Run the three phases; a request counts in the phase in which it was sent, one that was broken off nowhere."""
    trace = StepTrace()
    begin_s = clock()
    phase = [BEFORE]
    prompt_of = itertools.cycle(prompts)

    async def one_after_another() -> None:
        while True:
            sent_in = phase[0]
            reply = await ask(next(prompt_of))
            trace.replies[sent_in].append(reply)

    with contextlib.ExitStack() as running:
        tasks = [_started(running, one_after_another()), _started(running, _sample(trace, read_load, phase, clock))]
        await _passed(options.alone_s, tasks)
        phase[0] = LOAD
        with contextlib.ExitStack() as crowd:
            joined = [_started(crowd, one_after_another()) for _ in range(options.concurrency - 1)]
            await _passed(options.load_s, [*tasks, *joined])
        phase[0] = AFTER
        trace.load_ended_s = clock() - begin_s
        await _passed(options.alone_s, tasks)
    return trace


def _started(stack: contextlib.ExitStack, work: Any) -> asyncio.Task[None]:
    """Start a task that is cancelled when the stack is left."""
    task: asyncio.Task[None] = asyncio.ensure_future(work)
    stack.callback(task.cancel)
    return task


async def _passed(seconds: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait; the first of these tasks that fails ends the wait with its error."""
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in done:
        task.result()


async def _sample(trace: StepTrace, read_load: ReadLoad, phase: Sequence[str], clock: Clock) -> None:
    begin_s, before = clock(), dict[str, int]()
    while True:
        load = await read_load()
        counts = {_reason(item): int(item["count"]) for item in load["decisions"]}
        verifiers = load["verifiers"]
        prices = [verifier["price"] for verifier in verifiers if verifier["price"] is not None]
        trace.samples.append(
            Sample(
                time_s=clock() - begin_s - (load["age_s"] or 0.0),
                phase=phase[0],
                num_running=load["totals"]["num_running"],
                price=statistics.fmean(prices) if prices else None,
                num_asks=sum(verifier["num_asks"] for verifier in verifiers),
                num_asked_tokens=sum(verifier["num_asked_tokens"] for verifier in verifiers),
                decisions={reason: n for reason, count in counts.items() if (n := count - before.get(reason, 0)) > 0},
            )
        )
        before = counts
        await asyncio.sleep(SAMPLE_INTERVAL_S)


def _reason(item: Mapping[str, Any]) -> str:
    return f"on: {item['reason']}" if item["decision"] == "on" else str(item["reason"])


# --- showing it ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Second:
    """What happened from the last sample before a second to the last one in it."""

    begin_s: float
    last: Sample
    draft_length: float
    decisions: Mapping[str, int]


def seconds_of(trace: StepTrace) -> Iterator[Second]:
    """Yield the seconds in which there was a sample."""
    before: Sample | None = None
    for second, group in itertools.groupby(trace.in_order(), key=lambda sample: int(sample.time_s)):
        samples = list(group)
        decisions = collections.Counter[str]()
        for sample in samples:
            decisions.update(sample.decisions)
        length = draft_length_between(before or samples[0], samples[-1])
        before = samples[-1]
        yield Second(begin_s=float(second), last=before, draft_length=length, decisions=decisions)


def to_markdown(title: str, off: StepTrace, on: StepTrace) -> str:
    """Write a page: the summary, then what happened second by second with speculation on."""
    lines = [
        "# A load step",
        "",
        title,
        "",
        "| | speculation off | adaptive |",
        "|---|---:|---:|",
        *(f"| {name} | {cell(off)} | {cell(on)} |" for name, cell in SUMMARY),
        "",
        "| second | phase | running | price | draft length | decisions |",
        "|---:|---|---:|---:|---:|---|",
    ]
    for second in seconds_of(on):
        last = second.last
        price = "-" if last.price is None else f"{last.price:.2f}"
        shown = ", ".join(f"{reason} {count}" for reason, count in sorted(second.decisions.items()))
        cells = (f"{second.begin_s:.0f}", last.phase, str(last.num_running), price, f"{second.draft_length:.2f}", shown)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _acceptance(phase: str) -> Callable[[StepTrace], str]:
    def cell(trace: StepTrace) -> str:
        rate = trace.drafts(phase).draft_acceptance_rate
        return "-" if rate is None else f"{rate:.0%}"

    return cell


def _first_token(phase: str, share: float) -> Callable[[StepTrace], str]:
    def cell(trace: StepTrace) -> str:
        seconds = percentile(trace.first_tokens_s(phase), share)
        return "-" if seconds is None else f"{seconds * 1e3:.0f}"

    return cell


def _recovery(trace: StepTrace) -> str:
    if trace.draft_length(BEFORE) == 0.0:
        return "-"
    return "never" if trace.recovery_s is None else f"{trace.recovery_s:.2f}"


SUMMARY: tuple[tuple[str, Callable[[StepTrace], str]], ...] = (
    *((f"requests answered, {p}", lambda trace, p=p: str(len(trace.replies[p]))) for p in PHASES),
    ("errors", lambda trace: str(len(trace.errors))),
    *((f"TTFT p50 {p}, ms", _first_token(p, 0.5)) for p in PHASES),
    *((f"TTFT p90 {p}, ms", _first_token(p, 0.9)) for p in PHASES),
    *((f"draft length {p}", lambda trace, p=p: f"{trace.draft_length(p):.2f}") for p in PHASES),
    *((f"accepted {p}", _acceptance(p)) for p in PHASES),
    ("full drafts again after the load's end, s", _recovery),
)


@click.command(context_settings=CONTEXT_SETTINGS)
@server_options
@click.option("--concurrency", type=click.IntRange(2), default=64, show_default=True, help="Streams under load.")
@click.option("--alone-s", type=click.FloatRange(1), default=8.0, show_default=True, help="Seconds before and after.")
@click.option("--load-s", type=click.FloatRange(1), default=12.0, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=48, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@files("markdown")
def step(
    concurrency: int,
    alone_s: float,
    load_s: float,
    max_tokens: int,
    temperature: float,
    markdown_file: Path | None,
    **connection: Any,
) -> None:
    """Go from one stream to many and back, with speculation off and then on: decisions, recovery, first tokens."""
    options = StepOptions(concurrency=concurrency, alone_s=alone_s, load_s=load_s)
    fields = {"max_tokens": max_tokens, "temperature": temperature, "ignore_eos": True}
    try:
        off, on = asyncio.run(_run(Server(**connection), read_prompts(None, 16), options, fields))
    except (ServerError, OSError) as error:
        raise click.ClickException(str(error)) from error
    title = (
        f"`make study NAME=step`: 1, {concurrency} and 1 streams for {alone_s:g}, {load_s:g} and {alone_s:g} s, "
        f"{max_tokens} tokens a request, temperature {temperature:g}; {time.strftime('%Y-%m-%d')}."
    )
    show_page(to_markdown(title, off, on), PLAIN_WIDTH, markdown_file)


async def _run(
    server: Server, prompts: tuple[Prompt, ...], options: StepOptions, fields: dict[str, Any]
) -> tuple[StepTrace, StepTrace]:
    async with open_client(server) as client:
        model = await first_model(client)

        async def read_load() -> dict[str, Any]:
            response = await client.get("/load")
            response.raise_for_status()
            return dict(response.json())

        def asking(**more: Any) -> Ask:
            async def ask(prompt: Prompt) -> Reply:
                body = {"model": model, "prompt": prompt, "stream_options": {"include_usage": True}, **fields, **more}
                return await stream_reply(client, body, time.perf_counter)

            return ask

        for prompt in prompts:  # both runs find them in the prefix cache
            await asking(max_tokens=1)(prompt)
        off = await run_step(asking(num_speculative_tokens=0), read_load, prompts, options, clock=time.perf_counter)
        return off, await run_step(asking(), read_load, prompts, options, clock=time.perf_counter)
