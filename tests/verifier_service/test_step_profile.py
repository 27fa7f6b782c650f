"""The profile's batches are judged by the fake runner (tables, positions); its times only by their shape."""

from __future__ import annotations

from collections import Counter

import pytest

from engine_bench import make_runner
from fake_runner import FakeRunner
from outrider.verifier_service.batch import ScheduledBatch
from outrider.verifier_service.step_profile import NUM_REPEATS, measure_step_times


def batches_of(runner: FakeRunner, max_tokens: int) -> list[ScheduledBatch]:
    measure_step_times(runner, max_tokens)
    return runner.batches


@pytest.mark.parametrize(
    ("max_tokens", "num_blocks", "counts"),
    [
        (1, 64, [1]),
        (2, 64, [1, 2]),
        (16, 64, [1, 2, 4, 8, 16]),
        (31, 64, [1, 2, 4, 8, 16]),
        (64, 9, [1, 2, 4, 8]),
        (64, 1, [1]),
    ],
)
def test_counts_double_up_to_the_smaller_limit(max_tokens: int, num_blocks: int, counts: list[int]):
    runner = make_runner(num_blocks=num_blocks)
    times = measure_step_times(runner, max_tokens)
    assert [time.num_tokens for time in times] == counts
    assert all(time.seconds > 0 for time in times)


def test_every_count_is_warmed_up_once_and_then_repeated():
    num_batches = Counter(batch.num_tokens for batch in batches_of(make_runner(), 8))
    assert num_batches == dict.fromkeys((1, 2, 4, 8), 1 + NUM_REPEATS)


def test_batches_are_one_token_sequences_in_blocks_of_their_own():
    runner = make_runner(num_blocks=8)
    for batch in batches_of(runner, 8):
        count = batch.num_tokens
        assert batch.query_lengths == batch.context_lengths == [1] * count
        assert batch.positions == [0] * count
        assert batch.logits_indices == list(range(count))
        blocks = [block_id for table in batch.block_tables for block_id in table]
        assert len(set(blocks)) == count
        assert all(0 <= block_id < runner.num_blocks for block_id in blocks)
        assert batch.slot_mapping == [block_id * runner.block_size for block_id in blocks]
        assert all(0 <= token_id < runner.vocab_size for token_id in batch.token_ids)
