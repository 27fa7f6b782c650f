"""The one wait of tests whose other side runs on its own: ask again until something holds."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 30.0
PAUSE_S = 0.005


async def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Return once a condition holds, which may be awaitable; raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while not await _asked(condition):
            await asyncio.sleep(PAUSE_S)


async def _asked(condition: Callable[[], Any]) -> Any:
    found = condition()
    return await found if inspect.isawaitable(found) else found


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    """Do as `until` does, where there is no event loop."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline_s:
            raise TimeoutError(f"what was waited for did not come within {timeout_s} s")
        time.sleep(PAUSE_S)


async def healthy() -> bool:
    """Be the health check of a service that is well."""
    return True
