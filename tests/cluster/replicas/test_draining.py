from __future__ import annotations

import asyncio

from outrider.cluster.replicas.draining import wait_until


async def test_it_waits_for_the_condition():
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, done.set)
    assert await wait_until(done.is_set, timeout_s=5.0)


async def test_it_gives_up_in_time():
    assert not await wait_until(lambda: False, timeout_s=0.1)
