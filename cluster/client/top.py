"""`outrider top`: poll a running service and show its load, or that it does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import sys
import termios
import tty
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TextIO

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from outrider.cluster.client.openai_client import Server, open_client
from outrider.cluster.client.top_view import Latency, TopState, render

ANSWER_TIMEOUT_S = 5.0
HISTOGRAMS = {
    "outrider_time_to_first_token_seconds": "time to first token",
    "outrider_inter_token_latency_seconds": "inter-token",
    "outrider_e2e_request_latency_seconds": "end to end",
}


class NoAnswerError(RuntimeError):
    """The server did not answer, or is not an Outrider service."""


def run(server: Server, console: Console, *, interval_s: float, once: bool, clock: Callable[[], float]) -> TopState:
    """Show frames until interrupted, or a single one; return the last state."""
    return asyncio.run(_watch(server, console, interval_s=interval_s, once=once, clock=clock))


async def _watch(
    server: Server, console: Console, *, interval_s: float, once: bool, clock: Callable[[], float]
) -> TopState:
    state, answered_s = TopState(url=server.base_url), clock()
    async with open_client(server) as client:
        if once:
            state = await observe(client, state)
            console.print(render(state))
            return state
        with (
            quit_key(sys.stdin) as quitting,
            Live(_frame(state), console=console, screen=True, auto_refresh=False) as live,
        ):
            while not quitting.is_set():
                state = await observe(client, state)
                answered_s = clock() if state.error is None else answered_s
                state = replace(state, age_s=clock() - answered_s)
                live.update(_frame(state), refresh=True)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await quitting.wait()
    return state


def _frame(state: TopState) -> RenderableType:
    return Group(render(state), Text("\nq quits", style="dim"))


@contextlib.contextmanager
def quit_key(keyboard: TextIO) -> Iterator[asyncio.Event]:
    """Yield an event that is set when q is typed; without a terminal, never."""
    quitting = asyncio.Event()
    if not keyboard.isatty():
        yield quitting
        return
    number = keyboard.fileno()
    before = termios.tcgetattr(number)

    def on_key() -> None:
        if os.read(number, 64).lower().startswith(b"q"):
            quitting.set()

    tty.setcbreak(number)  # keys arrive at once, and Ctrl-C still interrupts
    asyncio.get_running_loop().add_reader(number, on_key)
    try:
        yield quitting
    finally:
        asyncio.get_running_loop().remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)


async def observe(client: httpx.AsyncClient, before: TopState) -> TopState:
    """Poll once; without an answer, return the state before with the error."""
    try:
        answer = (await _get(client, "/load")).json()
        latencies = latencies_of((await _get(client, "/metrics")).text)
    except (NoAnswerError, httpx.HTTPError, ValueError) as error:
        return replace(before, error=f"{type(error).__name__}: {error}".rstrip(": "))
    if not isinstance(answer, dict) or "verifiers" not in answer:
        return replace(before, error="its /load is not that of an Outrider service")
    return replace(before, load=answer, latencies=latencies, error=None)


async def _get(client: httpx.AsyncClient, path: str) -> httpx.Response:
    response = await client.get(path, timeout=ANSWER_TIMEOUT_S)
    if response.status_code != httpx.codes.OK:
        raise NoAnswerError(f"{path}: HTTP {response.status_code}")
    return response


def latencies_of(exposition: str) -> tuple[Latency, ...]:
    """Return quantiles of the known histograms that have values."""
    found = []
    for family in text_string_to_metric_families(exposition):
        buckets: dict[float, float] = defaultdict(float)
        for sample in family.samples:
            if family.name in HISTOGRAMS and sample.name.endswith("_bucket"):
                buckets[float(sample.labels["le"])] += sample.value
        if buckets and buckets[math.inf]:
            found.append(
                Latency(
                    name=HISTOGRAMS[family.name],
                    p50_s=quantile(buckets, 0.5),
                    p99_s=quantile(buckets, 0.99),
                    count=int(buckets[math.inf]),
                )
            )
    return tuple(found)


def quantile(buckets: dict[float, float], share: float) -> float:
    """Return a quantile of cumulative buckets (upper bound to count), interpolated as Prometheus does.

    Values above the last finite bound count as that bound.
    """
    points = sorted(buckets.items())
    rank = share * points[-1][1]
    for (lower, below), (upper, upto) in itertools.pairwise([(0.0, 0.0), *points]):
        if upto >= rank:
            return lower if math.isinf(upper) else lower + (upper - lower) * (rank - below) / (upto - below)
    raise ValueError("a histogram's last bucket holds every value")
