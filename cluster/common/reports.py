"""Calls to the router; its absence is no failure of the caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from outrider.cluster.common.background import is_being_cancelled

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
SAME_INTERVAL_S = 1.0  # of a report that says nothing new; well within the router's `expire_after_s`
REPORT_TIMEOUT_S = 1.0
ROUTER_ERRORS = (RayError, RayServeException, TimeoutError)


class NoAnswerError(RuntimeError):
    """A replica did not answer in time, or failed."""


async def ask(method: Any, *arguments: Any, timeout_s: float) -> Any:
    """Call a method of a deployment's handle; raises `NoAnswerError`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await method.remote(*arguments)
    except ROUTER_ERRORS as error:
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
    except asyncio.CancelledError:
        if is_being_cancelled():
            raise
        raise NoAnswerError("the call to it was cancelled") from None


async def answers_of(method: Any, *arguments: Any, timeout_s: float) -> AsyncGenerator[Any]:
    """Yield what a method of a deployment's handle yields; raises `NoAnswerError`, or where nothing comes for so long.

    Closing the generator ends the call.
    """
    answers = method.options(stream=True).remote(*arguments)
    has_ended = False
    try:
        while True:
            async with asyncio.timeout(timeout_s):
                answer = await anext(answers)
            yield answer
    except StopAsyncIteration:
        has_ended = True
    except (RayError, RayServeException) as error:
        has_ended = True
        raise NoAnswerError(f"{type(error).__name__}: {error}") from error
    except TimeoutError:
        raise NoAnswerError(f"nothing came for {timeout_s:g} s") from None
    except asyncio.CancelledError:
        if is_being_cancelled():
            raise
        raise NoAnswerError("the call to it was cancelled") from None
    finally:
        if not has_ended:
            answers.cancel()


async def ask_router(method: Any, *arguments: Any, timeout_s: float = REPORT_TIMEOUT_S) -> Any | None:
    """Call a method of the router's deployment handle; None: it did not answer in time."""
    try:
        return await ask(method, *arguments, timeout_s=timeout_s)
    except NoAnswerError as error:
        logger.warning("the router did not answer: %s", error)
    return None


class Reports:
    """When a replica's reports are due: one that says something new at once, the same one again now and then.

    A call to the router costs milliseconds of processor time on either side, and a service at rest has nothing to say.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: object = None
        self._told_s = 0.0

    def take(self, report: object) -> bool:
        """Return whether a report is due, which is then taken for told."""
        now_s = self._clock()
        if report == self._told and now_s - self._told_s < SAME_INTERVAL_S:
            return False
        self._told, self._told_s = report, now_s
        return True


async def news_or_interval(news: asyncio.Event, interval_s: float = REPORT_INTERVAL_S) -> None:
    """Wait for `news`, at most for the interval, and clear it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(interval_s):
            await news.wait()
    news.clear()
