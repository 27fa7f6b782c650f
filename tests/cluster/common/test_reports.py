from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, RayServeException

from outrider.cluster.common.reports import (
    REPORT_INTERVAL_S,
    SAME_INTERVAL_S,
    NoAnswerError,
    Reports,
    ask,
    ask_router,
    news_or_interval,
)
from outrider.cluster.router.fleet import RouterPolicy


class Method:
    """A method of a deployment handle: `.remote()` gives an awaitable."""

    def __init__(self, answer: Any = None, *, delay_s: float = 0.0) -> None:
        self.answer, self.delay_s = answer, delay_s
        self.asked: list[tuple[Any, ...]] = []
        self.was_cancelled = False

    async def remote(self, *arguments: Any) -> Any:
        self.asked.append(arguments)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


async def test_the_answer_is_passed_on_and_so_are_the_arguments():
    method = Method("plan")
    assert await ask_router(method, 1, "two") == "plan"
    assert method.asked == [(1, "two")]


async def test_a_router_that_hangs_is_given_up_and_its_call_cancelled():
    method = Method("late", delay_s=60.0)
    begin_s = asyncio.get_running_loop().time()
    assert await ask_router(method, timeout_s=0.05) is None
    assert asyncio.get_running_loop().time() - begin_s < 30.0
    assert method.was_cancelled


@pytest.mark.parametrize(
    "error", [RayActorError(), RayServeException("no replica"), BackPressureError(1, 1), TimeoutError()]
)
async def test_a_router_that_is_away_is_no_failure(error: Exception, caplog: pytest.LogCaptureFixture):
    assert await ask_router(Method(error)) is None
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("answer", [RayActorError(), asyncio.CancelledError(), TimeoutError()])
async def test_a_replica_that_does_not_answer_is_an_error_that_says_why(answer: BaseException):
    with pytest.raises(NoAnswerError, match=r"\w"):
        await ask(Method(answer), timeout_s=5.0)
    with pytest.raises(NoAnswerError, match="TimeoutError"):
        await ask(Method(delay_s=60.0), timeout_s=0.05)


async def test_a_call_that_serve_cancels_is_a_router_that_is_away():
    assert await ask_router(Method(asyncio.CancelledError())) is None


async def test_a_caller_that_is_cancelled_stops():
    method = Method(delay_s=60.0)
    call = asyncio.create_task(ask_router(method, timeout_s=60.0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert method.was_cancelled


async def test_a_caller_that_is_cancelled_as_the_answer_comes_stops_too():
    asked, answered = asyncio.Event(), asyncio.Event()

    class Answering:
        async def remote(self) -> str:
            asked.set()
            await answered.wait()
            return "plan"

    call = asyncio.create_task(ask_router(Answering()))
    await asked.wait()
    answered.set()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_handle_that_fails_before_it_gives_an_awaitable_is_away_too():
    class Broken:
        def remote(self) -> Any:
            raise RayServeException("deployment deleted")

    assert await ask_router(Broken()) is None


async def test_mistakes_of_our_own_are_not_hidden():
    with pytest.raises(ZeroDivisionError):
        await ask_router(Method(ZeroDivisionError()))


def test_a_report_that_says_nothing_new_is_told_again_now_and_then():
    now_s = 0.0
    reports = Reports(lambda: now_s)
    assert [reports.take(text) for text in ("a", "a", "b", "b", "a")] == [True, False, True, False, True]
    now_s = SAME_INTERVAL_S - 0.01
    assert not reports.take("a")
    now_s = SAME_INTERVAL_S
    assert reports.take("a")
    assert not reports.take("a")
    assert RouterPolicy().expire_after_s > 2 * SAME_INTERVAL_S, "one may be lost"


async def test_news_are_reported_at_once_and_the_lack_of_them_after_the_interval():
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    begin_s = loop.time()
    loop.call_soon(news.set)
    await news_or_interval(news)
    assert loop.time() - begin_s < REPORT_INTERVAL_S / 2
    await news_or_interval(news)
    assert loop.time() - begin_s >= REPORT_INTERVAL_S, "news are told once"
