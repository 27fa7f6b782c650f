"""What a simulated run showed, in a few numbers.

Definitions
    window       from the end of the first quarter of the arrivals' span to the last arrival
    throughput   tokens committed in the window / its length
    TTFT, TPOT   time to first token; mean time per output token after it; of the requests that arrive in the window
    goodput      output tokens of those of them that meet both bounds / the window's length, at most the throughput
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from outrider.lab.simulate.simulation import Simulation

WARM_UP_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBounds:
    """What a request must keep to count as good. Raises `ValueError` naming the field that is out of range."""

    ttft_s: float = 2.0
    tpot_s: float = 0.05

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """The figures of one run; the module says what the names mean."""

    name: str
    qps: float  # that arrived in the window
    num_requests: int
    num_accelerators: int
    tokens_per_s: float
    goodput_tokens_per_s: float
    good_share: float  # of the window's requests
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    mean_acceptance_length: float | None  # None: nothing was drafted
    draft_length: float | None
    num_steps: int
    num_events: int  # of the queue, runs of like rounds, and ends of requests

    @property
    def tokens_per_s_per_accelerator(self) -> float:
        return self.tokens_per_s / self.num_accelerators

    @classmethod
    def of(cls, name: str, simulation: Simulation, bounds: LatencyBounds) -> RunFigures:
        """Sum up a simulation that has run."""
        ledger, workload = simulation.ledger, simulation.workload
        begin_s, end_s = WARM_UP_SHARE * float(workload.arrival_s[-1]), float(workload.arrival_s[-1])
        span_s = max(end_s - begin_s, 1e-9)
        arrived = workload.arrival_s >= begin_s
        ttft_s, tpot_s = ledger.ttft_s[arrived], ledger.tpot_s[arrived]
        is_good = (ttft_s <= bounds.ttft_s) & (tpot_s <= bounds.tpot_s)
        throughput = ledger.tokens_between(begin_s, end_s) / span_s
        num_drafts = ledger.num_drafts
        return cls(
            name=name,
            qps=float(np.count_nonzero(arrived)) / span_s,
            num_requests=workload.num_requests,
            num_accelerators=simulation.fleet.num_accelerators,
            tokens_per_s=throughput,
            goodput_tokens_per_s=min(throughput, float(workload.num_output_tokens[arrived][is_good].sum()) / span_s),
            good_share=float(is_good.mean()),
            ttft_p50_s=float(np.quantile(ttft_s, 0.5)),
            ttft_p99_s=float(np.quantile(ttft_s, 0.99)),
            tpot_p50_s=float(np.quantile(tpot_s, 0.5)),
            tpot_p99_s=float(np.quantile(tpot_s, 0.99)),
            mean_acceptance_length=1.0 + ledger.num_accepted_tokens / num_drafts if num_drafts else None,
            draft_length=ledger.num_draft_tokens / num_drafts if num_drafts else None,
            num_steps=ledger.num_steps,
            num_events=simulation.num_events + ledger.num_advances + ledger.num_finished,
        )
