"""Measure, at start, how long a step takes by its number of tokens and their context: the verifier's cost curve.

Token counts of 1, 2, 4 … give the curve's course. The gaps between them are bisected where the time in the middle is
off the line between the ends. That finds knees and the stairs of padded batches; a straight gap costs one more point.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.pricing.cost_model import ContextTime, StepTimeModel

if TYPE_CHECKING:
    from outrider.verifier_service.engine.runners import Runner

NUM_REPEATS = 5
NUM_ALWAYS = 64  # powers of two up to this many tokens are always measured …
PATIENCE_S = 1.0  # … larger ones only within this time
GAPS_PATIENCE_S = 0.5  # for bisecting the gaps
BEND = 0.05  # largest relative distance from the line between two points that counts as straight
GAPS_PER_OCTAVE = 8  # finest resolution
MAX_CONTEXT_TOKENS = 1 << 16  # read in the step that measures attention over a long context
TOKEN_STRIDE = 7919  # spreads the token ids: a mixture of experts routes equal tokens to equal experts


@dataclass(frozen=True, slots=True)
class StepProfile:
    """Step times measured before the first request."""

    step_times: tuple[StepTime, ...]  # of sequences of one token, without context
    context: ContextTime | None  # None: too few points to compare with

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> StepProfile:
        return cls(
            step_times=tuple(StepTime(**time) for time in values["step_times"]),
            context=None if values["context"] is None else ContextTime(**values["context"]),
        )


def measure_step_profile(
    runner: Runner, max_tokens: int, clock: Callable[[], float] = time.perf_counter
) -> StepProfile:
    """Time steps of 1, 2, 4 … `max_tokens` tokens, some between them, and one over the longest contexts that fit.

    A time is the minimum of a few runs: on a busy machine (replicas that start together) a median may be of stalls and
    show a knee that is none. The sequences write to KV blocks that no request owns yet.
    """

    def step_s(count: int, context_length: int = 1) -> float:
        return _step_time_s(runner, count, context_length, clock)

    seconds: dict[int, float] = {}
    count, begin_s = 1, clock()
    while count <= min(max_tokens, runner.num_blocks):
        if count > NUM_ALWAYS and clock() - begin_s > PATIENCE_S:
            break
        seconds[count] = step_s(count)
        count *= 2
    deadline_s = clock() + GAPS_PATIENCE_S
    _halve_gaps(seconds, step_s, is_late=lambda: clock() > deadline_s)
    times = tuple(StepTime(num_tokens=count, seconds=seconds[count]) for count in sorted(seconds))
    return StepProfile(times, _context_time(runner, times, step_s))


def _halve_gaps(seconds: dict[int, float], step_s: Callable[[int], float], is_late: Callable[[], bool]) -> None:
    """Add the time in the middle of each gap; bisect the halves as well where the curve bends. Quick steps first."""
    counts = sorted(seconds)
    gaps = deque(pairwise(counts))
    while gaps and not is_late():
        low, high = gaps.popleft()
        if (high - low) * GAPS_PER_OCTAVE < 2 * low or high - low < 2:
            continue
        middle = (low + high) // 2
        seconds[middle] = step_s(middle)
        share = (middle - low) / (high - low)
        on_line_s = seconds[low] + share * (seconds[high] - seconds[low])
        if abs(seconds[middle] / on_line_s - 1.0) > BEND:
            gaps.extend(((low, middle), (middle, high)))


def _context_time(
    runner: Runner, times: tuple[StepTime, ...], step_s: Callable[[int, int], float]
) -> ContextTime | None:
    """Compare the longest sequences that fit the model and the KV pool with as many that have no context."""
    if len(times) < 2:
        return None
    num_slots = min(runner.num_blocks * runner.block_size, MAX_CONTEXT_TOKENS)
    length = min(runner.max_model_len, num_slots) // runner.block_size * runner.block_size
    if length < runner.block_size:
        return None
    affordable = max(1, int(PATIENCE_S / (1 + NUM_REPEATS) / step_s(1, length)))
    count = min(num_slots // length, times[-1].num_tokens, affordable)
    plain_s = StepTimeModel.from_points(times).t(count)
    num_read = count * length
    return ContextTime(seconds=max(0.0, step_s(count, length) - plain_s) / num_read, num_tokens=num_read)


def _step_time_s(runner: Runner, count: int, context_length: int, clock: Callable[[], float]) -> float:
    blocks_each = -(-context_length // runner.block_size)
    tables = [list(range(index * blocks_each, (index + 1) * blocks_each)) for index in range(count)]
    last = context_length - 1
    batch = ScheduledBatch(
        token_ids=[index * TOKEN_STRIDE % runner.vocab_size for index in range(count)],
        positions=[last] * count,
        slot_mapping=[table[-1] * runner.block_size + last % runner.block_size for table in tables],
        query_lengths=[1] * count,
        context_lengths=[context_length] * count,
        block_tables=tables,
        logits_indices=list(range(count)),
    )
    runner.execute(batch)  # warm-up: allocations and kernel selection
    samples = []
    for _ in range(NUM_REPEATS):
        begin_s = clock()
        runner.execute(batch)[:1].cpu()  # the copy synchronises with an accelerator
        samples.append(clock() - begin_s)
    return min(samples)
