"""Asyncio tasks whose end is their replica's failure, and a test for cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """Tasks that run as long as their replica; health checks call `check`."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine, name=name))

    def check(self) -> None:
        """Raise `RuntimeError` if a task has ended, caused by its error."""
        for task in self._tasks:
            if task.done():
                cause = asyncio.CancelledError() if task.cancelled() else task.exception()
                raise RuntimeError(f"background task {task.get_name()!r} has ended") from cause

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def is_being_cancelled() -> bool:
    """Return whether the running task is being cancelled: not every `CancelledError` means that.

    Serve also raises it in the caller if the callee was cancelled (ray/serve/_private/replica_result.py).
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
