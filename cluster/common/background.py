"""Asyncio tasks: those whose death is their replica's (`check` belongs into every health check); who is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundTasks:
    """Tasks that run for as long as their replica lives."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(coroutine, name=name))

    def check(self) -> None:
        """Raise `RuntimeError` if a task has ended, with what ended it as the cause."""
        for task in self._tasks:
            if task.done():
                cause = asyncio.CancelledError() if task.cancelled() else task.exception()
                raise RuntimeError(f"background task {task.get_name()!r} has ended") from cause

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def is_being_cancelled() -> bool:
    """Return whether somebody cancels the running task: what it calls may raise `CancelledError` of its own accord.

    Serve does so where a callee was cancelled (ray/serve/_private/replica_result.py); the caller was not.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
