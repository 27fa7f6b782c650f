"""The host of an engine, with ranks that are played by the test."""

from __future__ import annotations

import asyncio
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import grpc
import pytest

from outrider.cluster.replicas.engine_host import EngineHost
from outrider.verifier_service.messages.engine import FROM_ENGINE, EngineReady, EngineUpdate, Published
from outrider.verifier_service.messages.request import RequestOutput
from outrider.verifier_service.messages.wire import encode

READY = EngineReady(vocab_size=8, max_model_len=64, eos_token_ids=(), num_kv_blocks=4, step_times=())
UPDATE = EngineUpdate(outputs=(Published.of(RequestOutput(request_id="a", token_ids=(1,))),))


class PlayedRanks:
    def __init__(self) -> None:
        self.near, self.engine = Pipe()
        self.is_stopped = False
        self.has_ended = False

    async def connect(self) -> Connection:
        return self.near

    def ended(self) -> bool:
        return self.has_ended

    async def pids(self) -> list[int]:
        return [7]

    def stop(self) -> None:
        self.is_stopped = True


class Bench:
    def __init__(self, *, timeout_s: float = 10.0) -> None:
        self.ranks = PlayedRanks()
        self.messages: list[object] = []
        self.failures: list[str] = []
        self.host = EngineHost(on_message=self.messages.append, on_failure=self.failures.append, timeout_s=timeout_s)

    async def start(self) -> EngineReady:
        self.ranks.engine.send_bytes(encode(READY))
        return await self.host.start(self.ranks, FROM_ENGINE)


async def test_first_frame_is_the_engines_word_that_it_is_ready_and_later_ones_are_passed_on():
    bench = Bench()
    bench.ranks.engine.send_bytes(encode(READY))
    bench.ranks.engine.send_bytes(encode(UPDATE))  # read in one go with the first
    assert await bench.host.start(bench.ranks, FROM_ENGINE) == READY
    await asyncio.sleep(0.02)
    assert bench.messages == [UPDATE]
    bench.host.check()
    await bench.host.close()
    assert bench.ranks.is_stopped


async def test_engine_that_ends_while_starting_fails_the_start_and_everything_is_freed():
    bench = Bench()
    bench.ranks.engine.close()
    with pytest.raises(ConnectionError):
        await bench.host.start(bench.ranks, FROM_ENGINE)
    await bench.host.close()
    assert bench.ranks.is_stopped
    assert bench.failures == [], "nobody was using it yet"


async def test_lost_engine_is_told_and_unhealthy():
    bench = Bench()
    await bench.start()
    bench.ranks.engine.close()
    await asyncio.sleep(0.02)
    assert len(bench.failures) == 1
    with pytest.raises(RuntimeError, match="end of file"):
        bench.host.check()
    await bench.host.close()


async def test_silent_engine_is_given_up_at_the_time_out_and_not_before():
    bench = Bench(timeout_s=0.5)
    await bench.start()
    for _ in range(8):
        await asyncio.sleep(0.1)
        bench.ranks.engine.send_bytes(encode(UPDATE))
    assert bench.failures == []
    bench.host.check()
    async with asyncio.timeout(10):
        while not bench.failures:
            await asyncio.sleep(0.01)
    assert bench.failures == ["the engine has been silent for 0.5 s"]
    with pytest.raises(RuntimeError, match="silent"):
        bench.host.check()
    with pytest.raises(ConnectionError, match="silent"):
        bench.host.send(UPDATE)
    await bench.host.close()
    assert len(bench.failures) == 1


async def test_a_pause_of_the_host_itself_is_not_the_engines_silence():
    bench = Bench(timeout_s=0.5)
    await bench.start()
    await asyncio.sleep(0.02)
    time.sleep(0.7)  # as a stopped machine: nothing runs, here or in the engine
    await asyncio.sleep(0.02)
    bench.ranks.engine.send_bytes(encode(UPDATE))
    await asyncio.sleep(0.02)
    assert (bench.failures, bench.messages) == ([], [UPDATE])
    await bench.host.close()


async def test_ended_rank_and_ended_task_are_unhealthy():
    bench = Bench()
    await bench.start()
    bench.ranks.has_ended = True
    with pytest.raises(RuntimeError, match="a rank has ended"):
        bench.host.check()
    bench.ranks.has_ended = False
    bench.host.tasks.start(asyncio.sleep(0), "short")
    await asyncio.sleep(0.02)
    with pytest.raises(RuntimeError, match="'short' has ended"):
        bench.host.check()
    await bench.host.close()


async def test_what_goes_with_the_engine_is_closed_before_its_ranks():
    bench, were_stopped = Bench(), []

    async def close_links() -> None:
        were_stopped.append(bench.ranks.is_stopped)

    await bench.start()
    bench.host.on_close(close_links)
    await bench.host.close()
    assert were_stopped == [False]
    assert bench.ranks.is_stopped


async def test_closing_twice_or_before_the_start_is_no_error():
    bench = Bench()
    await bench.host.close()
    with pytest.raises(ConnectionError):
        bench.host.send(UPDATE)
    await bench.host.close()


async def test_served_port_is_open_until_closed():
    bench = Bench()
    await bench.start()
    endpoint = await bench.host.serve("127.0.0.1", lambda server: None)
    async with grpc.aio.insecure_channel(endpoint) as channel:
        await asyncio.wait_for(channel.channel_ready(), 5)
    await bench.host.close()
    async with grpc.aio.insecure_channel(endpoint) as channel:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.channel_ready(), 0.3)
