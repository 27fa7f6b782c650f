"""The load generator: who is sent when, never more than asked for, and nothing lost when the time is over."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time

import pytest

from outrider.lab.bench.load import CUT_OFF, NOT_SENT, LoadPoint, Prompt, Reply, arrival_times_s, run_load

PROMPTS = [f"prompt {index}" for index in range(12)]
NUM_TURNS = 50  # of the event loop: by then all prompts have come, however slow the machine is


class Server:
    """Answer after some turns of the event loop, or never; remember who was there together."""

    def __init__(self, *, num_answered: float = math.inf) -> None:
        self.num_answered = num_answered
        self.prompts: list[Prompt] = []
        self.num_running = self.most_running = 0

    async def ask(self, prompt: Prompt) -> Reply:
        self.prompts.append(prompt)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            if len(self.prompts) > self.num_answered:
                await asyncio.get_running_loop().create_future()
            for _ in range(NUM_TURNS):
                await asyncio.sleep(0)
        finally:
            self.num_running -= 1
        return Reply(sent_s=0.0, ended_s=1.0, num_tokens=PROMPTS.index(str(prompt)))


async def load(server: Server, point: LoadPoint, max_seconds: float = 30.0):
    return await run_load(
        server.ask, PROMPTS, point, rng=random.Random(1), clock=time.perf_counter, max_seconds=max_seconds
    )


@pytest.mark.parametrize("concurrency", [1, 5, 12, 50])
async def test_a_closed_loop_keeps_exactly_so_many_requests_under_way(concurrency: int):
    server = Server()
    trace = await load(server, LoadPoint(concurrency=concurrency))
    assert server.most_running == min(concurrency, len(PROMPTS))
    assert server.prompts == PROMPTS
    assert [reply.num_tokens for reply in trace.replies] == list(range(12))
    assert trace.elapsed_s > 0


async def test_an_open_loop_follows_its_schedule_whatever_the_server_does():
    server = Server()
    trace = await load(server, LoadPoint(request_rate=400.0))
    expected_s = arrival_times_s(len(PROMPTS), 400.0, random.Random(1))[-1]
    assert expected_s <= trace.elapsed_s
    assert len(trace.replies) == len(PROMPTS)


@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_arrivals_are_a_poisson_process_of_the_rate_and_the_seed(rate: float):
    times_s = arrival_times_s(20_000, rate, random.Random(3))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    mean = sum(gaps) / len(gaps)
    assert times_s[0] == 0.0
    assert mean == pytest.approx(1 / rate, rel=0.03)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.05)  # exponential
    assert times_s == arrival_times_s(20_000, rate, random.Random(3)) != arrival_times_s(20_000, rate, random.Random(4))


@pytest.mark.parametrize(("point", "num_sent"), [(LoadPoint(concurrency=3), 6), (LoadPoint(request_rate=math.inf), 12)])
async def test_what_is_left_when_the_time_is_over_is_counted(point: LoadPoint, num_sent: int):
    server = Server(num_answered=3)
    trace = await load(server, point, max_seconds=0.2)
    errors = [reply.error for reply in trace.replies]
    assert len(errors) == len(PROMPTS)
    assert errors.count(None) == 3
    assert errors.count(CUT_OFF) == num_sent - 3
    assert errors.count(NOT_SENT) == len(PROMPTS) - num_sent
    assert server.num_running == 0  # cancelled, not forgotten
