import asyncio

import pytest

from outrider.cluster.common.background import BackgroundTasks


async def test_running_tasks_are_healthy_until_stopped():
    tasks = BackgroundTasks()
    tasks.start(asyncio.sleep(60), "sleep")
    await asyncio.sleep(0)
    tasks.check()
    await tasks.stop()
    with pytest.raises(RuntimeError, match="'sleep' has ended"):
        tasks.check()


async def test_death_of_a_task_is_told_with_its_cause():
    async def die() -> None:
        raise OSError("disk on fire")

    tasks = BackgroundTasks()
    tasks.start(die(), "die")
    await asyncio.sleep(0.01)
    with pytest.raises(RuntimeError, match="'die' has ended") as raised:
        tasks.check()
    assert isinstance(raised.value.__cause__, OSError)
    await tasks.stop()
