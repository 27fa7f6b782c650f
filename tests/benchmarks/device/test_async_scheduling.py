"""The played device of the benchmark, in a few steps."""

from __future__ import annotations

import pytest

from benchmarks.device import async_scheduling


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_takes_its_forward_at_least(is_async: bool) -> None:
    assert async_scheduling.step_s(2, 0.002, is_async=is_async, num_steps=4) >= 0.0019


def test_there_is_a_row_for_each_load_and_forward() -> None:
    table = async_scheduling.rows(num_steps=2, streams=(1, 3))
    assert [row[:2] for row in table] == [["5 ms", "1"], ["5 ms", "3"], ["10 ms", "1"], ["10 ms", "3"]]
    assert all(len(row) == 5 for row in table)
