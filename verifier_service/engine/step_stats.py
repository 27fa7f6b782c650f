"""Counters and rates of the verifier's steps."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.verifier_service.drafting.followed_updates import Acceptance
from outrider.verifier_service.messages.counts import FetchCounts, GraphCounts, Histogram
from outrider.verifier_service.messages.request import RequestOutput
from outrider.verifier_service.scheduling.schedule import Schedule

STEP_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
QUEUE_BOUNDS_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
NUM_VERSIONS = 4  # whose acceptance is kept
NUM_RATE_SAMPLES = 11  # sliding window of ten report intervals


@dataclass(slots=True)
class StepStats:
    """Counters since start."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_committed_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    by_version: dict[str, Acceptance] = field(default_factory=dict)  # of the target's weights, the present one last
    idle_s: float = 0.0  # no step ran because every request waited for its draft
    graphs: GraphCounts = field(default_factory=GraphCounts)  # the runner's own, if it captures steps
    fetches: FetchCounts | None = None  # the runner's own; None: all experts are on the device
    step_s: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    queue_s: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS_S))

    @property
    def busy_s(self) -> float:
        """Return the time spent in steps."""
        return self.step_s.total

    def observe(self, schedule: Schedule, outputs: Sequence[RequestOutput], *, began_s: float, ended_s: float) -> None:
        """Count one step and its committed tokens."""
        self.num_steps += 1
        self.num_scheduled_tokens += schedule.batch.num_tokens
        self.step_s.observe(ended_s - began_s)
        for item in schedule.items:
            if item.request.first_scheduled_s is None:
                item.request.first_scheduled_s = began_s
                self.queue_s.observe(began_s - item.request.arrival_s)
            if item.samples and item.request.inter_token_time is not None:
                item.request.inter_token_time.observe(item.request.num_tokens, ended_s)
        self.num_committed_tokens += sum([len(output.token_ids) for output in outputs])
        drafted = [output for output in outputs if output.num_draft_tokens]
        if not drafted:
            return
        num_draft_tokens = sum([output.num_draft_tokens for output in drafted])
        num_accepted_tokens = sum([output.num_accepted_tokens for output in drafted])
        verified = self._of_version(drafted[0].weight_version)  # of one step all are of one
        for counts in (self, verified):
            counts.num_draft_tokens += num_draft_tokens
            counts.num_accepted_tokens += num_accepted_tokens
        self.num_drafts += len(drafted)

    def _of_version(self, version: str) -> Acceptance:
        """Return a version's counts, which become the last ones; forget those of the version before all others."""
        found = self.by_version.pop(version, None) or Acceptance()
        self.by_version[version] = found
        if len(self.by_version) > NUM_VERSIONS:
            del self.by_version[next(iter(self.by_version))]
        return found


@dataclass(frozen=True, slots=True)
class _Sample:
    taken_s: float
    num_committed_tokens: int
    num_steps: int
    num_asks: int
    num_asked_tokens: int
    busy_s: float
    idle_s: float


class RecentRates:
    """Tokens per second, step time and draft length over the last `NUM_RATE_SAMPLES` reports."""

    def __init__(self) -> None:
        self._samples: collections.deque[_Sample] = collections.deque(maxlen=NUM_RATE_SAMPLES)

    def sample(self, stats: StepStats, now_s: float, *, num_asks: int = 0, num_asked_tokens: int = 0) -> None:
        """Add the present counters to the window; `num_asks` and `num_asked_tokens` are the coordinator's."""
        self._samples.append(
            _Sample(
                taken_s=now_s,
                num_committed_tokens=stats.num_committed_tokens,
                num_steps=stats.num_steps,
                num_asks=num_asks,
                num_asked_tokens=num_asked_tokens,
                busy_s=stats.busy_s,
                idle_s=stats.idle_s,
            )
        )

    @property
    def tokens_per_s(self) -> float:
        """Return committed tokens / elapsed time of the window; 0 with fewer than two samples."""
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return (last.num_committed_tokens - first.num_committed_tokens) / max(last.taken_s - first.taken_s, 1e-9)

    @property
    def mean_step_s(self) -> float | None:
        """Return the mean step time of the window; None without a step."""
        if not self._samples:
            return None
        first, last = self._samples[0], self._samples[-1]
        num_steps = last.num_steps - first.num_steps
        return (last.busy_s - first.busy_s) / num_steps if num_steps else None

    @property
    def draft_length_mean(self) -> float:
        """Return the window's draft tokens asked for per decoding request and step; 0 without an ask."""
        if not self._samples:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return (last.num_asked_tokens - first.num_asked_tokens) / max(1, last.num_asks - first.num_asks)

    @property
    def idle_share(self) -> float:
        """Return the share of the window in which no step ran because every request waited for its draft."""
        if len(self._samples) < 2:
            return 0.0
        first, last = self._samples[0], self._samples[-1]
        return min(1.0, (last.idle_s - first.idle_s) / max(last.taken_s - first.taken_s, 1e-9))
