"""Measure how long a step takes as the number of its tokens grows: the verifier's cost curve, taken at start."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from outrider.verifier_service.batch import ScheduledBatch
from outrider.verifier_service.engine_messages import StepTime

if TYPE_CHECKING:
    from outrider.verifier_service.engine import Runner

NUM_REPEATS = 5


def measure_step_times(runner: Runner, max_tokens: int) -> tuple[StepTime, ...]:
    """Time steps of 1, 2, 4 … `max_tokens` one-token sequences (median of a few), before anything is served.

    The scratch sequences write to KV blocks that no request owns yet.
    """
    counts = [1]
    while counts[-1] * 2 <= min(max_tokens, runner.num_blocks):
        counts.append(counts[-1] * 2)
    return tuple(StepTime(num_tokens=count, seconds=_step_time_s(runner, count)) for count in counts)


def _step_time_s(runner: Runner, num_tokens: int) -> float:
    batch = ScheduledBatch(
        token_ids=[0] * num_tokens,
        positions=[0] * num_tokens,
        slot_mapping=[block_id * runner.block_size for block_id in range(num_tokens)],
        query_lengths=[1] * num_tokens,
        context_lengths=[1] * num_tokens,
        block_tables=[[block_id] for block_id in range(num_tokens)],
        logits_indices=list(range(num_tokens)),
    )
    runner.execute(batch)  # allocations and kernel choices are not part of the curve
    samples = []
    for _ in range(NUM_REPEATS):
        begin_s = time.perf_counter()
        runner.execute(batch)[:1].cpu()  # the copy waits for an accelerator to finish
        samples.append(time.perf_counter() - begin_s)
    return statistics.median(samples)
