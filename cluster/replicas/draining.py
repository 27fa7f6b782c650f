"""Delay a replica's shutdown until its streams have ended: Serve counts its own calls only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.cluster.common.reports import REPORT_INTERVAL_S

POLL_INTERVAL_S = 0.05
HAND_OVER_INTERVAL_S = 1.0
HEARD_S = 2 * REPORT_INTERVAL_S  # until every gateway and verifier knows that a replica drains


async def empty_out(is_empty: Callable[[], bool], hand_over: Callable[[], None], timeout_s: float) -> bool:
    """Hand requests over until none is left, those that begin to decode meanwhile, too; return whether none is left."""
    clock = asyncio.get_running_loop().time
    end_s = clock() + timeout_s
    while not is_empty() and (left_s := end_s - clock()) > 0.0:
        hand_over()
        await wait_until(is_empty, min(left_s, HAND_OVER_INTERVAL_S))
    return is_empty()


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; return whether it came true in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        return condition()
    return True
