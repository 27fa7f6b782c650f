"""Delay a replica's shutdown until its streams have ended: Serve counts its own calls only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.cluster.common.reports import REPORT_INTERVAL_S

POLL_INTERVAL_S = 0.05
HEARD_S = 2 * REPORT_INTERVAL_S  # until every gateway and verifier knows that a replica drains


async def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; return whether it came true in time."""
    try:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(POLL_INTERVAL_S)
    except TimeoutError:
        return condition()
    return True
