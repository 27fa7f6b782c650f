"""The loop between a verifier's shell and vLLM, which is played; the pipe is real."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from fakes.hosted.vllm_outputs import output, scheduler_stats
from outrider.cluster.vllm_engine.load import VllmLoad
from outrider.cluster.vllm_engine.loop import LOAD_INTERVAL_S, VllmLoop
from outrider.verifier_service.messages.engine import (
    FROM_ENGINE,
    Cancel,
    ControlResult,
    EngineLoad,
    PauseGeneration,
    SetPlans,
)
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import decode, encode

TIMEOUT_S = 10.0


class PlayedVllm:
    """Answers each request with its prompt, token by token, and then waits until it may end."""

    def __init__(self) -> None:
        self.is_dead = False
        self.aborted: list[str] = []
        self.may_end = asyncio.Event()
        self.load = VllmLoad()
        self.error: Exception | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        try:
            for token_id in request.prompt_token_ids:
                self.load.record(scheduler_stats(1), None)
                yield output([token_id])
            await self.may_end.wait()
            if self.error is not None:
                raise self.error
            yield output([0], "stop")
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(request.request_id)
            raise

    def fail(self, error: Exception, *, is_dead: bool) -> None:
        self.error, self.is_dead = error, is_dead
        self.may_end.set()


class Shell:
    """The other end of the pipe, and all that came through it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.outputs: list[RequestOutput] = []
        self.loads: list[EngineLoad] = []
        self.results: list[ControlResult] = []

    def send(self, *messages: Any) -> None:
        for message in messages:
            self._pipe.send_bytes(message if isinstance(message, bytes) else encode(message))

    def take(self) -> None:
        while self._pipe.poll(0):
            update = decode(self._pipe.recv_bytes(), FROM_ENGINE)
            self.outputs += [output.opened() for output in update.outputs]
            self.loads += [update.load] if update.load is not None else []
            self.results += update.results

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self.take()
                await asyncio.sleep(0.005)

    def close(self) -> None:
        self._pipe.close()

    def tokens_of(self, request_id: str) -> list[int]:
        return [token_id for one in self.outputs if one.request_id == request_id for token_id in one.token_ids]

    @property
    def ended(self) -> dict[str, FinishReason]:
        return {one.request_id: one.finish_reason for one in self.outputs if one.finish_reason is not None}


@contextlib.asynccontextmanager
async def hosting(vllm: PlayedVllm) -> AsyncIterator[tuple[Shell, asyncio.Task[None]]]:
    near, far = Pipe()
    task = asyncio.create_task(VllmLoop(vllm, vllm.load, far, is_drafted=False).run())
    try:
        yield Shell(near), task
    finally:
        near.close()
        async with asyncio.timeout(TIMEOUT_S):
            await task
        far.close()


def request(request_id: str, *token_ids: int) -> GenerationRequest:
    return GenerationRequest(request_id=request_id, prompt_token_ids=token_ids)


async def test_what_only_our_own_engine_does_is_refused():
    async with hosting(PlayedVllm()) as (shell, _):
        shell.send(PauseGeneration(call_id="p"))
        await shell.until(lambda: bool(shell.results))
        assert "vLLM's own endpoints" in str(shell.results[0].error)


async def test_requests_are_served_beside_each_other_each_in_order():
    vllm = PlayedVllm()
    async with hosting(vllm) as (shell, _):
        shell.send(request("a", 1, 2, 3), request("b", 7, 8))
        await shell.until(lambda: len(shell.outputs) == 5)
        assert not shell.ended
        vllm.may_end.set()
        await shell.until(lambda: len(shell.ended) == 2)
        assert (shell.tokens_of("a"), shell.tokens_of("b")) == ([1, 2, 3, 0], [7, 8, 0])
    assert not vllm.aborted


async def test_a_load_comes_even_from_an_idle_engine_and_says_who_is_there():
    async with hosting(PlayedVllm()) as (shell, _):
        await shell.until(lambda: len(shell.loads) >= 2)
        assert shell.loads[-1].requests == ()
        shell.send(request("a", 1))
        await shell.until(lambda: shell.loads[-1].requests != ())
        assert [one.request_id for one in shell.loads[-1].requests] == ["a"]


async def test_an_engine_that_takes_no_step_falls_silent_so_that_it_is_given_up():
    vllm = PlayedVllm()
    async with hosting(vllm) as (shell, _):
        shell.send(request("a", 1))
        await shell.until(lambda: bool(shell.loads) and shell.loads[-1].requests != ())
        await asyncio.sleep(3 * LOAD_INTERVAL_S)
        shell.take()
        num_loads = len(shell.loads)
        await asyncio.sleep(3 * LOAD_INTERVAL_S)
        shell.take()
        assert len(shell.loads) == num_loads
        vllm.load.record(scheduler_stats(1), None)
        await shell.until(lambda: len(shell.loads) == num_loads + 1)
        vllm.may_end.set()
        await shell.until(lambda: len(shell.loads) > num_loads + 2)


async def test_a_cancelled_request_is_aborted_in_vllm_and_others_go_on():
    vllm = PlayedVllm()
    async with hosting(vllm) as (shell, _):
        shell.send(request("a", 1), request("b", 2))
        await shell.until(lambda: len(shell.outputs) == 2)
        shell.send(Cancel(request_id="a"), Cancel(request_id="nobody"), SetPlans(plans={}))
        await shell.until(lambda: vllm.aborted == ["a"])
        vllm.may_end.set()
        await shell.until(lambda: shell.ended == {"b": FinishReason.STOP})


async def test_a_request_cancelled_before_it_began_is_forgotten():
    vllm = PlayedVllm()
    async with hosting(vllm) as (shell, _):
        shell.send(request("a", 1), Cancel(request_id="a"), request("b", 2))
        await shell.until(lambda: bool(shell.loads) and [one.request_id for one in shell.loads[-1].requests] == ["b"])


@pytest.mark.parametrize(
    ("error", "said"),
    [(ValueError("min_p: no"), "min_p: no"), (RuntimeError("odd"), "vLLM failed: RuntimeError: odd")],
)
async def test_a_request_that_fails_ends_with_why_and_the_next_is_served(error: Exception, said: str):
    vllm = PlayedVllm()
    async with hosting(vllm) as (shell, _):
        vllm.fail(error, is_dead=False)
        shell.send(request("a", 1))
        await shell.until(lambda: shell.ended == {"a": FinishReason.ERROR})
        assert shell.outputs[-1].error == said
        vllm.error = None
        shell.send(request("b", 2))
        await shell.until(lambda: shell.ended.get("b") is FinishReason.STOP)


async def test_a_request_that_does_not_decode_is_answered_by_the_field():
    vllm = PlayedVllm()
    vllm.may_end.set()
    async with hosting(vllm) as (shell, _):
        shell.send(encode(request("a", 1)).replace(b"priority\x00", b"priority\xc0"), request("b", 2))
        await shell.until(lambda: shell.ended == {"a": FinishReason.ERROR, "b": FinishReason.STOP})
        (refused,) = [output for output in shell.outputs if output.request_id == "a"]
        assert "priority" in refused.error


async def test_the_loop_ends_with_vllm_and_says_nothing_of_its_requests():
    """The shell sees the end of file, and the gateway goes on elsewhere: an error here would end the stream."""
    vllm = PlayedVllm()
    async with hosting(vllm) as (shell, task):
        shell.send(request("a", 1))
        await shell.until(lambda: len(shell.outputs) == 1)
        vllm.fail(RuntimeError("engine core died"), is_dead=True)
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.shield(task)
        shell.take()
        assert not shell.ended


async def test_the_loop_ends_with_its_shell_and_aborts_what_runs():
    vllm = PlayedVllm()
    async with hosting(vllm) as (shell, task):
        shell.send(request("a", 1))
        await shell.until(lambda: len(shell.outputs) == 1)
        shell.close()
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.shield(task)
        assert vllm.aborted == ["a"]
