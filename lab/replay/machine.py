"""The machine that recorded requests are replayed on: a published fit of an H100, and what was drafted on it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from outrider.lab.replay.hindsight import Recorded
from outrider.lab.replay.traces import LOOK_UPS, TraceError, drafted_places, read_traces

EAGLE = "eagle"  # as recorded
NUM_TRACES = 60  # the first of a file, of which a bound is taken

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFit:
    """Seconds of one step, by its parts; the defaults are the published fit.

    The knee: a weight of `weight_bytes` takes part in 2 FLOP per token, so a machine of `flop_per_byte` (H100: 990
    bf16 TFLOP/s over 3.35 TB/s, about 300) computes as long as it loads weights at flop_per_byte · weight_bytes / 2
    tokens: 300. From there on nothing of the weights' time is left to share, so it is proportional to the tokens:
    forward(n) = fit(min(n, knee)) · max(1, n / knee). Attention over the context is added to either.
    """

    fixed_s: float = 5.886e-3
    token_s: float = 2.101e-5
    context_token_s: float = 3.926e-8
    overhead_s: float = 1.207e-3
    eagle_fixed_s: float = 2.135e-3  # of a whole draft: the fit does not depend on its length
    eagle_token_s: float = 8.41e-7
    eagle_context_token_s: float = 2.378e-9
    ngram_share: float = 0.006  # of the forward pass
    flop_per_byte: float = 300.0
    weight_bytes: float = 2.0

    @property
    def knee(self) -> float:
        """Return the tokens of a step from which the machine is compute-bound."""
        return self.flop_per_byte * self.weight_bytes / 2.0

    def forward_s(self, num_tokens: FloatArray, num_context_tokens: float) -> FloatArray:
        """Return the target's seconds for each number of tokens."""
        below = self.fixed_s + self.token_s * np.minimum(num_tokens, self.knee)
        return below * np.maximum(1.0, num_tokens / self.knee) + self.context_token_s * num_context_tokens

    def draft_s(
        self, forward_s: FloatArray, num_eagle_tokens: IntArray, num_ngram_tokens: IntArray, num_context_tokens: float
    ) -> FloatArray:
        """Return the seconds of drafting beside each forward pass: one pass of EAGLE for all, look-ups for all."""
        eagle_s = (
            self.eagle_fixed_s + self.eagle_token_s * num_eagle_tokens + self.eagle_context_token_s * num_context_tokens
        )
        return np.where(num_eagle_tokens > 0, eagle_s, 0.0) + np.where(
            num_ngram_tokens > 0, self.ngram_share * forward_s, 0.0
        )


@dataclass(frozen=True, slots=True)
class PublishedMachine:
    """The fit at a recorded request's mean context, as the `Machine` of a bound."""

    context: float  # tokens of each request
    fit: MachineFit

    def step_s(self, num_rows: int, num_requests: int) -> float:
        rows = np.array([float(num_rows)])
        return float(self.fit.forward_s(rows, num_requests * self.context)[0]) + self.fit.overhead_s

    def draft_s(self, method: str, num_requests: int, longest: int) -> float:
        num_tokens, context = num_requests * longest, num_requests * self.context
        forward_s = self.fit.forward_s(np.array([float(num_requests + num_tokens)]), context)
        eagle, look_ups = (np.array([num_tokens * is_own]) for is_own in (method == EAGLE, method != EAGLE))
        return float(self.fit.draft_s(forward_s, eagle, look_ups, context)[0])


def recorded_drafts(path: Path, length: int) -> tuple[Recorded, float]:
    """Return what EAGLE was recorded to draft and our look-ups would have, and the requests' mean context in tokens.

    Raises `TraceError` where a request has no drafts of EAGLE.
    """
    traces = read_traces(path, NUM_TRACES)
    if not all(trace.recorded.get(EAGLE) for trace in traces):
        raise TraceError(f"{path}: a request has no acc_{EAGLE}")
    recorded = {
        EAGLE: [[(length, min(each - 1, length)) for each in trace.recorded[EAGLE]] for trace in traces],
        **{name: drafted_places(make, traces, length, nodes) for name, (make, nodes) in LOOK_UPS.items()},
    }
    return recorded, statistics.fmean(len(trace.prompt_ids) + len(trace.generated_ids) / 2 for trace in traces)


@dataclass(slots=True)
class Walk:
    """What one method's verifications come to, from each to the token after what it commits."""

    name: str
    num_tokens: int = 0
    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted: Counter[int] = field(default_factory=Counter)  # verifications, by how many tokens they accept

    @classmethod
    def of(cls, name: str, requests: Sequence[Sequence[tuple[int, int]]]) -> Walk:
        walk = cls(name)
        for places in requests:
            at = 0
            while at < len(places):
                drafted, right = places[at]
                committed = min(right + 1, len(places) - at)
                walk.num_tokens += committed
                walk.num_rounds += 1
                walk.num_drafts += drafted > 0
                walk.num_draft_tokens += drafted
                walk.accepted[min(right, committed)] += 1
                at += committed
        return walk

    def by_position(self, num_positions: int) -> list[float]:
        """Return the share of verifications that accept so many tokens or more."""
        return [
            sum(self.accepted[most] for most in self.accepted if most > at) / self.num_rounds
            for at in range(num_positions)
        ]
