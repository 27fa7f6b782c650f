"""Send requests to a server as a load point says, and note when everything came. Sans HTTP: `ask` does the talking.

Closed loop (`concurrency`): so many requests at a time, the next one when one ends.
Open loop (`request_rate`): requests begin at the times of a Poisson process, whatever the server does; at an infinite
rate all at once.

Why our own: guidellm 0.3.1 brings 65 packages (609 MB, 83 s to install), `vllm bench serve` needs vLLM, and neither
counts drafts by request. Both speak to any OpenAI-compatible server, ours included (docs/results/vllm_bench.md).
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from outrider.verifier_service.messages.request import SpeculationMetrics

Prompt = str | Sequence[int]
Clock = Callable[[], float]
OnReply = Callable[[], None]

NOT_SENT = "not sent: the time was over"
CUT_OFF = "cut off: the time was over"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPoint:
    """One load: exactly one of the two is given. Raises `ValueError` naming the field that is out of range."""

    concurrency: int | None = None  # requests at a time
    request_rate: float | None = None  # requests per second on average

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.request_rate is None):
            raise ValueError("give either concurrency or request_rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError("concurrency must be at least 1")
        if self.request_rate is not None and not self.request_rate > 0.0:
            raise ValueError("request_rate must be above 0")

    @property
    def value(self) -> str:
        return str(self.concurrency) if self.concurrency is not None else f"{self.request_rate:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of one request: `chunk_times_s` are those of the stream's pieces that brought text."""

    sent_s: float
    chunk_times_s: tuple[float, ...] = ()
    ended_s: float
    num_tokens: int = 0
    drafts: SpeculationMetrics = field(default_factory=SpeculationMetrics)
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTrace:
    """All replies of one load point, in the order of the requests."""

    point: LoadPoint
    elapsed_s: float  # from the first request's begin to the last one's end
    replies: tuple[Reply, ...]


Ask = Callable[[Prompt], Awaitable[Reply]]


def arrival_times_s(num_requests: int, request_rate: float, rng: random.Random) -> list[float]:
    """Return when the requests of a Poisson process begin, the first at 0."""
    if math.isinf(request_rate):
        return [0.0] * num_requests
    gaps = (rng.expovariate(request_rate) for _ in range(num_requests - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


async def run_load(
    ask: Ask,
    prompts: Sequence[Prompt],
    point: LoadPoint,
    *,
    rng: random.Random,
    clock: Clock,
    max_seconds: float,
    on_reply: OnReply = lambda: None,
) -> LoadTrace:
    """Ask all prompts; what has no reply after `max_seconds` is cancelled and becomes an error of its own kind."""
    run = _Run(ask, prompts, clock, on_reply)
    begin_s = clock()
    try:
        async with asyncio.timeout(max_seconds):
            if point.request_rate is not None:
                await run.open_loop(arrival_times_s(len(prompts), point.request_rate, rng))
            else:
                assert point.concurrency is not None
                await run.closed_loop(point.concurrency)
    except TimeoutError:
        run.give_up()
    return LoadTrace(
        point=point, elapsed_s=clock() - begin_s, replies=tuple(run.replies[i] for i in sorted(run.replies))
    )


class _Run:
    """One load point in progress."""

    def __init__(self, ask: Ask, prompts: Sequence[Prompt], clock: Clock, on_reply: OnReply) -> None:
        self._ask = ask
        self._prompts = prompts
        self._clock = clock
        self._on_reply = on_reply
        self._sent_s: dict[int, float] = {}
        self.replies: dict[int, Reply] = {}

    async def open_loop(self, times_s: Sequence[float]) -> None:
        async with asyncio.TaskGroup() as group:
            begin_s = self._clock()
            for index, time_s in enumerate(times_s):
                await asyncio.sleep(max(0.0, begin_s + time_s - self._clock()))
                group.create_task(self._send(index))

    async def closed_loop(self, concurrency: int) -> None:
        waiting = iter(range(len(self._prompts)))

        async def one_after_another() -> None:
            for index in waiting:
                await self._send(index)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(self._prompts))):
                group.create_task(one_after_another())

    async def _send(self, index: int) -> None:
        self._sent_s[index] = self._clock()
        self.replies[index] = await self._ask(self._prompts[index])
        self._on_reply()

    def give_up(self) -> None:
        """Count what has no reply as failed."""
        now_s = self._clock()
        for index in range(len(self._prompts)):
            if index not in self.replies:
                sent_s = self._sent_s.get(index)
                error = NOT_SENT if sent_s is None else CUT_OFF
                self.replies[index] = Reply(sent_s=now_s if sent_s is None else sent_s, ended_s=now_s, error=error)
