"""Links in virtual time whose frames and channels take what the test says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.verifier_service.links.state_ways import (
    LIKELY_CHANNEL_BYTES,
    MIN_CHANNEL_BYTES,
    NUM_TRIES,
    RETRY_EVERY,
    StateWays,
)

KIB = 1 << 10


def sent(ways: StateWays, num_bytes: int, num_messages: int, took_s: Callable[[bool], float]) -> list[bool]:
    """Send messages one after another; return which went through the channel."""
    chosen: list[bool] = []
    for _ in range(num_messages):
        by_channel = ways.choose_channel(num_bytes)
        ways.observe(num_bytes, took_s(by_channel), by_channel=by_channel)
        chosen.append(by_channel)
    return chosen


@pytest.mark.parametrize("is_channel_faster", [False, True])
@pytest.mark.parametrize("num_bytes", [MIN_CHANNEL_BYTES, 24 * KIB, LIKELY_CHANNEL_BYTES, 64 << 20])
def test_the_faster_way_is_taken_but_for_a_few_messages(num_bytes: int, is_channel_faster: bool):
    def took_s(by_channel: bool) -> float:
        return 0.005 if by_channel == is_channel_faster else 0.006

    chosen = sent(StateWays(), num_bytes, 10 * RETRY_EVERY, took_s)
    num_slower = chosen.count(not is_channel_faster)
    assert NUM_TRIES <= num_slower <= NUM_TRIES + 10


def test_each_size_has_its_own():
    """A frame takes 1 ms and 2 ns a byte, the channel 2 ms and 1 ns a byte: equal at a megabyte."""
    ways = StateWays()
    for kib in (16, 64, 256, 4096, 16384):
        num_bytes = kib * KIB

        def took_s(by_channel: bool, num_bytes: int = num_bytes) -> float:
            return 2e-3 + 1e-9 * num_bytes if by_channel else 1e-3 + 2e-9 * num_bytes

        sent(ways, num_bytes, 2 * NUM_TRIES, took_s)
    assert [ways.choose_channel(kib * KIB) for kib in (16, 64, 256, 4096, 16384)] == [False] * 3 + [True] * 2


def test_before_anything_is_known_large_ones_go_through_the_channel():
    assert StateWays().choose_channel(LIKELY_CHANNEL_BYTES)
    assert not StateWays().choose_channel(LIKELY_CHANNEL_BYTES - 1)


def test_the_smallest_never_do():
    ways = StateWays()
    assert not any(sent(ways, MIN_CHANNEL_BYTES - 1, 2 * RETRY_EVERY, lambda _: 1.0))


def test_it_follows_a_network_that_changes():
    ways = StateWays()
    assert sent(ways, 64 * KIB, 100, lambda by_channel: 0.002 if by_channel else 0.004)[-1]
    later = sent(ways, 64 * KIB, 400, lambda by_channel: 0.020 if by_channel else 0.004)
    assert later.index(False) < RETRY_EVERY
    assert later[-RETRY_EVERY:].count(True) <= 1


def test_one_stall_changes_nothing():
    ways = StateWays()
    sent(ways, 64 * KIB, RETRY_EVERY + 1, lambda by_channel: 0.002 if by_channel else 0.004)
    ways.observe(64 * KIB, 5.0, by_channel=True)
    assert ways.choose_channel(64 * KIB)


def test_cold_first_rounds_are_not_held_against_the_way_that_had_them():
    ways = StateWays()
    channel_s = iter([1.0, 0.5])
    sent(ways, 64 * KIB, 2 * NUM_TRIES, lambda by_channel: next(channel_s, 0.002) if by_channel else 0.004)
    assert ways.choose_channel(64 * KIB)
