"""Calls to the router; its absence is no failure of the caller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from outrider.cluster.common.background import is_being_cancelled

logger = logging.getLogger(__name__)

REPORT_INTERVAL_S = 0.25
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


async def news_or_interval(news: asyncio.Event) -> None:
    """Wait for `news`, at most `REPORT_INTERVAL_S`, and clear it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REPORT_INTERVAL_S):
            await news.wait()
    news.clear()
