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
NUM_ALWAYS = 64  # tokens up to which steps are measured however long they take …
PATIENCE_S = 1.0  # … and beyond which no more when measuring has taken so long
TOKEN_STRIDE = 7919  # between the profile's tokens: a mixture of experts sends equal ones to the same experts


def measure_step_times(runner: Runner, max_tokens: int) -> tuple[StepTime, ...]:
    """Time steps of 1, 2, 4 … `max_tokens` one-token sequences (median of a few), before anything is served.

    The scratch sequences write to KV blocks that no request owns yet.
    """
    times: list[StepTime] = []
    count, begin_s = 1, time.perf_counter()
    while count <= min(max_tokens, runner.num_blocks):
        if count > NUM_ALWAYS and time.perf_counter() - begin_s > PATIENCE_S:
            break
        times.append(StepTime(num_tokens=count, seconds=_step_time_s(runner, count)))
        count *= 2
    return tuple(times)


def _step_time_s(runner: Runner, num_tokens: int) -> float:
    batch = ScheduledBatch(
        token_ids=[index * TOKEN_STRIDE % runner.vocab_size for index in range(num_tokens)],
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
