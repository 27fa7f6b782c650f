"""The table of draft-length policies: every dataset, drafter and batch size, each policy on the same queue.

Definitions
    off          no drafts; every speed-up is relative to its tokens per second at the same batch size
    K = 1 ...    every request drafts so many tokens
    table        the best K, 0 included, for this very batch size on this very data: vLLM's table by batch size, tuned
    adaptive     the engine's own survival estimates, cost model and step price: it knows the past only
    oracle       knows every survival probability, fitted per request and position over the whole trace beforehand, and
                 the true cost of the step
    clairvoyant  knows every outcome: a bound that no policy can reach
    mean draft   draft tokens per request and step, of adaptive and of the oracle
    hybrid       n-gram or EAGLE for each draft: by the request's own past; oracle and clairvoyant by what they know
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.cluster.policy_adaptive import Adaptive
from outrider.cluster.policy_arms import FixedLength, clairvoyant, oracle
from outrider.cluster.policy_replay import (
    EAGLE,
    MAX_LENGTH,
    NGRAM,
    MachineFit,
    Policy,
    ReplayFigures,
    Workload,
    replay_policy,
)
from outrider.cluster.trace_replay import Trace

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DRAFTERS = {"n-gram": (NGRAM,), "EAGLE": (EAGLE,), "hybrid": (NGRAM, EAGLE)}
MIN_TOKENS = 20_000  # committed in one replay, after a third as many that are not counted
TOKENS_PER_LANE = 1_000

MIN_OF_ORACLE = 0.95  # what adaptive has to reach
MIN_OF_TABLE = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One drafter at one batch size; every figure but the first is relative to speculation off."""

    dataset: str
    drafter: str
    batch_size: int
    off_throughput: float  # committed tokens per second
    fixed: tuple[float, ...]  # by length, 1 to MAX_LENGTH
    adaptive: float
    oracle: float
    clairvoyant: float
    adaptive_length: float  # mean draft length
    oracle_length: float

    @property
    def table_length(self) -> int:
        """Return the best fixed length here, 0 included: the entry of a table by batch size tuned on this data."""
        return max(range(MAX_LENGTH + 1), key=(1.0, *self.fixed).__getitem__)

    @property
    def table(self) -> float:
        return max(1.0, *self.fixed)

    @property
    def of_oracle(self) -> float:
        return self.adaptive / self.oracle

    @property
    def of_table(self) -> float:
        return self.adaptive / self.table

    @property
    def is_met(self) -> bool:
        return self.of_oracle >= MIN_OF_ORACLE and self.of_table >= MIN_OF_TABLE


def run_table(
    datasets: Sequence[tuple[str, Sequence[Trace]]],
    batch_sizes: Sequence[int],
    *,
    machine: MachineFit | None = None,
    min_tokens: int = MIN_TOKENS,
    on_point: Callable[[Point], None] = lambda _: None,
) -> list[Point]:
    """Replay everything; drafters that a dataset did not record are left out. `on_point` hears of each point."""
    machine = machine or MachineFit()
    points: list[Point] = []
    for dataset, traces in datasets:
        for drafter in _recorded(traces):
            bench = _Bench(dataset, drafter, Workload.from_traces(traces, DRAFTERS[drafter]), machine, min_tokens)
            for batch_size in batch_sizes:
                points.append(bench.point(batch_size))
                on_point(points[-1])
    return points


def count_points(datasets: Sequence[tuple[str, Sequence[Trace]]], batch_sizes: Sequence[int]) -> int:
    """Return how many points a table will have."""
    return len(batch_sizes) * sum(len(_recorded(traces)) for _, traces in datasets)


def _recorded(traces: Sequence[Trace]) -> list[str]:
    names = {name for trace in traces for name in trace.recorded}
    return [drafter for drafter, parts in DRAFTERS.items() if names.issuperset(parts)]


class _Bench:
    """One drafter on one dataset."""

    def __init__(self, dataset: str, drafter: str, workload: Workload, machine: MachineFit, min_tokens: int) -> None:
        self._dataset, self._drafter = dataset, drafter
        self._workload, self._machine, self._min_tokens = workload, machine, min_tokens
        self._oracle, self._clairvoyant = oracle(workload, machine), clairvoyant(workload, machine)

    def point(self, batch_size: int) -> Point:
        """Play every policy at one batch size."""
        num_drafters = len(self._workload.drafters)
        off, *fixed = (
            self._play(FixedLength(length, num_drafters, batch_size), batch_size) for length in range(MAX_LENGTH + 1)
        )
        adaptive = self._play(Adaptive(self._workload.drafters, self._machine), batch_size)
        best, bound = self._play(self._oracle, batch_size), self._play(self._clairvoyant, batch_size)
        return Point(
            dataset=self._dataset,
            drafter=self._drafter,
            batch_size=batch_size,
            off_throughput=off.throughput,
            fixed=tuple(figures.throughput / off.throughput for figures in fixed),
            adaptive=adaptive.throughput / off.throughput,
            oracle=best.throughput / off.throughput,
            clairvoyant=bound.throughput / off.throughput,
            adaptive_length=adaptive.mean_draft_length,
            oracle_length=best.mean_draft_length,
        )

    def _play(self, policy: Policy, batch_size: int) -> ReplayFigures:
        num_tokens = max(self._min_tokens, batch_size * TOKENS_PER_LANE)
        return replay_policy(
            self._workload,
            policy,
            self._machine,
            batch_size=batch_size,
            num_tokens=num_tokens,
            num_warmup_tokens=num_tokens // 3,
        )
