"""Replay recorded acceptance in virtual time: batches of requests, a step at a time, under a draft-length policy.

A trace says for each generated position what one verification there would have committed, so any draft length can be
played: a request at a position that drafts k tokens accepts the first of them up to what was recorded, commits these
and one more, and advances by that. Batches are continuous: a request that ends is replaced by the next one, and the
first ones begin somewhere in their middle, so that every step is one of a running server. Prompts are there already
(prefill costs every policy the same); their tokens count as context.

Time is the published fit of Llama-3.1-8B on an H100 (Liu et al., "Speculative Decoding: Performance or Illusion?",
2025, arXiv 2601.11580) with a compute-bound knee added, since it was fitted on batches of up to 64 requests.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.draft_lengths.recorded_lookup import recorded_kinds
from outrider.drafter_service.lookup.ngram_index import Kind
from outrider.lab.replay.machine import EAGLE, IntArray, MachineFit
from outrider.lab.replay.traces import NGRAM, Trace

MAX_LENGTH = 8  # of a draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Recorded requests laid end to end; a cell is one generated position of one of them.

    Where a drafter's text took another turn than the recorded one, its list has another length; a hybrid plays the
    positions that all of its drafters have.
    """

    drafters: tuple[str, ...]
    begins: IntArray  # [num_requests] first cell
    lengths: IntArray  # [num_requests] cells
    prompt_lengths: IntArray  # [num_requests]
    accepted: IntArray  # [num_drafters, num_cells] of a draft of MAX_LENGTH
    offered: IntArray  # [num_drafters, num_cells] tokens that the drafter can propose: MAX_LENGTH or none
    ngram_kinds: IntArray  # [num_cells, MAX_LENGTH] of prompt lookup's tokens, numbered from 1; 0: no draft

    @classmethod
    def from_traces(cls, traces: Sequence[Trace], drafters: Sequence[str]) -> Workload:
        """Lay out the requests that have positions of every drafter; raise `ValueError` where there is none."""
        kept = [trace for trace in traces if all(trace.recorded.get(name) for name in drafters)]
        if not kept:
            raise ValueError(f"no request has recorded lengths of {' and '.join(drafters)}")
        lengths = [min(len(trace.recorded[name]) for name in drafters) for trace in kept]
        pairs = list(zip(kept, lengths, strict=True))
        accepted = [[a - 1 for trace, n in pairs for a in trace.recorded[name][:n]] for name in drafters]
        kinds = _ngram_kinds(pairs) if NGRAM in drafters else np.zeros((sum(lengths), MAX_LENGTH), dtype=np.int64)
        return cls(
            drafters=tuple(drafters),
            begins=np.cumsum([0, *lengths[:-1]]),
            lengths=np.array(lengths),
            prompt_lengths=np.array([len(trace.prompt_ids) for trace in kept]),
            accepted=np.minimum(np.array(accepted), MAX_LENGTH),
            offered=np.array([(kinds[:, 0] > 0) | (name != NGRAM) for name in drafters]) * MAX_LENGTH,
            ngram_kinds=kinds,
        )

    @property
    def num_requests(self) -> int:
        return len(self.lengths)


def _ngram_kinds(pairs: Sequence[tuple[Trace, int]]) -> IntArray:
    """Return [num_cells, MAX_LENGTH]: the kinds of prompt lookup's tokens at the first positions of each trace."""
    numbers: dict[Kind, int] = defaultdict(itertools.count(1).__next__)
    rows = [
        [numbers[kind] for kind in kinds] or [0] * MAX_LENGTH
        for trace, length in pairs
        for kinds in _padded(recorded_kinds(trace.prompt_ids, trace.generated_ids, MAX_LENGTH), length)
    ]
    return np.array(rows, dtype=np.int64)


def _padded(kinds: Iterator[list[Kind]], length: int) -> Iterator[list[Kind]]:
    """Yield so many positions; beyond the text nothing is drafted."""
    return itertools.islice(itertools.chain(kinds, itertools.repeat([])), length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What is running before a step, as a policy may see it: one entry per request in each array."""

    request_ids: Sequence[str]
    requests: IntArray  # [batch_size] index in the workload
    cells: IntArray  # [batch_size] position in the workload; what is recorded there is the future
    offered: IntArray  # [num_drafters, batch_size] tokens that each drafter can propose
    ngram_kinds: IntArray  # [batch_size, MAX_LENGTH] of what prompt lookup can propose; 0: nothing
    num_context_tokens: int

    @property
    def size(self) -> int:
        return len(self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """What a policy drafts: which drafter and how many tokens for each request."""

    drafters: IntArray  # [batch_size]
    lengths: IntArray  # [batch_size] what is verified
    asked: IntArray | None = None  # [batch_size] what was drafted for that; None: no more than is verified


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step came to."""

    accepted: IntArray  # [batch_size] draft tokens
    is_finished: npt.NDArray[np.bool_]  # [batch_size]
    step_s: float  # forward pass and overhead
    draft_s: float


class Policy(Protocol):
    """Draft lengths, a step at a time; `observe` follows every `plan`."""

    def plan(self, batch: Batch) -> Drafts: ...

    def observe(self, batch: Batch, drafts: Drafts, outcome: StepOutcome) -> None: ...


@dataclass(slots=True)
class ReplayFigures:
    """What one policy did in one replay, the warm-up left out."""

    num_tokens: int = 0  # committed
    num_draft_tokens: int = 0
    num_verifications: int = 0
    num_steps: int = 0
    seconds: float = 0.0

    @property
    def throughput(self) -> float:
        """Committed tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def mean_draft_length(self) -> float:
        return self.num_draft_tokens / self.num_verifications


class _Lanes:
    """The running requests: as many lanes as the batch is large, refilled from an endless shuffled queue."""

    def __init__(self, workload: Workload, batch_size: int, seed: int) -> None:
        self._workload = workload
        self._rng = np.random.default_rng(seed)
        self._queue = self._shuffles()
        self._num_started = 0
        self.request_ids = [""] * batch_size
        self.requests = np.zeros(batch_size, dtype=np.int64)
        self.positions = np.zeros(batch_size, dtype=np.int64)
        for lane in range(batch_size):
            self._start(lane)
        self.positions = (self._rng.random(batch_size) * workload.lengths[self.requests]).astype(np.int64)

    def _shuffles(self) -> Iterator[int]:
        while True:
            yield from self._rng.permutation(self._workload.num_requests).tolist()

    def _start(self, lane: int) -> None:
        self.request_ids[lane] = f"request-{self._num_started}"
        self._num_started += 1
        self.requests[lane] = next(self._queue)
        self.positions[lane] = 0

    def batch(self) -> Batch:
        cells = self._workload.begins[self.requests] + self.positions
        return Batch(
            request_ids=tuple(self.request_ids),
            requests=self.requests.copy(),
            cells=cells,
            offered=self._workload.offered[:, cells],
            ngram_kinds=self._workload.ngram_kinds[cells],
            num_context_tokens=int((self._workload.prompt_lengths[self.requests] + self.positions).sum()),
        )

    def left(self) -> IntArray:
        return self._workload.lengths[self.requests] - self.positions

    def advance(self, committed: IntArray) -> npt.NDArray[np.bool_]:
        """Move every lane on; return which requests ended, their lanes being others' now."""
        self.positions += committed
        is_finished = self.left() <= 0
        for lane in np.flatnonzero(is_finished).tolist():
            self._start(lane)
        return is_finished


def replay_policy(
    workload: Workload,
    policy: Policy,
    machine: MachineFit,
    *,
    batch_size: int,
    num_tokens: int,
    num_warmup_tokens: int = 0,
    seed: int = 0,
) -> ReplayFigures:
    """Play until `num_tokens` are committed after the warm-up's; the queue is the same for every policy."""
    lanes, figures = _Lanes(workload, batch_size, seed), ReplayFigures()
    is_warm = num_warmup_tokens == 0
    while figures.num_tokens < (num_tokens if is_warm else num_warmup_tokens):
        batch = lanes.batch()
        drafts = policy.plan(batch)
        accepted = np.minimum(drafts.lengths, workload.accepted[drafts.drafters, batch.cells])
        committed = np.minimum(accepted + 1, lanes.left())
        step_s, draft_s = _step_times(workload, machine, batch, drafts)
        is_finished = lanes.advance(committed)
        policy.observe(
            batch,
            drafts,
            StepOutcome(accepted=accepted, is_finished=is_finished, step_s=step_s, draft_s=draft_s),
        )
        figures.num_tokens += int(committed.sum())
        figures.num_draft_tokens += int(drafts.lengths.sum())
        figures.num_verifications += batch_size
        figures.num_steps += 1
        figures.seconds += step_s + draft_s
        if not is_warm and figures.num_tokens >= num_warmup_tokens:
            is_warm, figures = True, ReplayFigures()
    return figures


def _step_times(workload: Workload, machine: MachineFit, batch: Batch, drafts: Drafts) -> tuple[float, float]:
    asked = drafts.lengths if drafts.asked is None else drafts.asked
    by_drafter = np.bincount(drafts.drafters, weights=asked, minlength=len(workload.drafters)).astype(np.int64)
    counts = dict(zip(workload.drafters, by_drafter, strict=True))
    num_tokens = np.array([batch.size + drafts.lengths.sum()], dtype=np.float64)
    forward_s = machine.forward_s(num_tokens, batch.num_context_tokens)
    draft_s = machine.draft_s(
        forward_s,
        np.array([counts.get(EAGLE, 0)]),
        np.array([counts.get(NGRAM, 0)]),
        batch.num_context_tokens,
    )
    return float(forward_s[0]) + machine.overhead_s, float(draft_s[0])
