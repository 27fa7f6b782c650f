from __future__ import annotations

import asyncio

import pytest

from outrider.cluster.replicas import draining
from outrider.cluster.replicas.draining import empty_out, wait_until


async def test_it_waits_for_the_condition():
    done = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, done.set)
    assert await wait_until(done.is_set, timeout_s=5.0)


async def test_it_gives_up_in_time():
    assert not await wait_until(lambda: False, timeout_s=0.1)


async def test_requests_are_handed_over_again_and_again_until_none_is_left(monkeypatch: pytest.MonkeyPatch):
    """Some begin to decode only after the first time."""
    monkeypatch.setattr(draining, "HAND_OVER_INTERVAL_S", 0.01)
    left = [3]

    def hand_over() -> None:
        left[0] -= 1

    assert await empty_out(lambda: left[0] == 0, hand_over, timeout_s=5.0)
    assert left == [0]


async def test_what_nobody_takes_ends_with_the_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(draining, "HAND_OVER_INTERVAL_S", 0.02)
    num_calls = 0

    def hand_over() -> None:
        nonlocal num_calls
        num_calls += 1
        assert num_calls <= 6, "its time is over"

    assert not await empty_out(lambda: False, hand_over, timeout_s=0.1)
    assert num_calls >= 2


async def test_an_empty_verifier_hands_nothing_over():
    calls: list[None] = []
    assert await empty_out(lambda: True, lambda: calls.append(None), timeout_s=0.1)
    assert calls == []
