"""What a load point shows, from the replies of its requests. Pure Python.

Times are the client's. A request that ended in an error counts under `errors` and in nothing else.

TTFT       time to first token: from sending a request to the first piece of its stream that brings text
ITL        inter-token latency: gap between two such pieces; with speculation a piece brings one or several tokens;
           one sample per gap, over all requests
TPOT       time per output token of a request: (E2EL - TTFT) / (output tokens - 1)
E2EL       end-to-end latency: from sending a request to the end of its stream
tokens/s   output tokens of completed requests / time from the first request's begin to the last one's end
requests/s completed requests / the same time
goodput    tokens/s of the completed requests that meet the SLO: TTFT at most `ttft_s`, and the 99th percentile of the
           request's own gaps at most `itl_s`; equal to tokens/s where no SLO is set
acceptance accepted / verified draft tokens and 1 + accepted / drafts, as the server reports them with each request
"""

from __future__ import annotations

import collections
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.lab.bench.figures import added, percentile
from outrider.lab.bench.load import LoadPoint, LoadTrace, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request must keep to count as goodput; None: no such bound. Raises `ValueError` naming the field."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "itl_s"):
            bound = getattr(self, name)
            if bound is not None and not bound > 0.0:
                raise ValueError(f"slo {name} must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A latency over requests or gaps, in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFigures:
    """What one load point shows; None: there was nothing to measure it by."""

    point: LoadPoint
    num_requests: int
    num_completed: int
    num_within_slo: int
    errors: Mapping[str, int]  # text -> how often
    elapsed_s: float
    requests_per_s: float
    tokens_per_s: float
    goodput_tokens_per_s: float
    ttft: Latency | None
    itl: Latency | None
    tpot: Latency | None
    e2el: Latency | None
    acceptance_rate: float | None
    mean_acceptance_length: float | None


def figures_of(trace: LoadTrace, slo: Slo) -> LoadFigures:
    """Compute one load point's figures."""
    completed = [reply for reply in trace.replies if reply.error is None]
    good = [reply for reply in completed if meets(reply, slo)]
    drafts = added(reply.drafts for reply in completed)
    return LoadFigures(
        point=trace.point,
        num_requests=len(trace.replies),
        num_completed=len(completed),
        num_within_slo=len(good),
        errors=collections.Counter(reply.error for reply in trace.replies if reply.error is not None),
        elapsed_s=trace.elapsed_s,
        requests_per_s=len(completed) / trace.elapsed_s,
        tokens_per_s=sum(reply.num_tokens for reply in completed) / trace.elapsed_s,
        goodput_tokens_per_s=sum(reply.num_tokens for reply in good) / trace.elapsed_s,
        ttft=_latency([reply.chunk_times_s[0] - reply.sent_s for reply in completed if reply.chunk_times_s]),
        itl=_latency([gap for reply in completed for gap in gaps_s(reply)]),
        tpot=_latency([time_s for reply in completed if (time_s := time_per_output_token_s(reply)) is not None]),
        e2el=_latency([reply.ended_s - reply.sent_s for reply in completed]),
        acceptance_rate=drafts.draft_acceptance_rate,
        mean_acceptance_length=drafts.mean_acceptance_length,
    )


def gaps_s(reply: Reply) -> list[float]:
    """Return the gaps between the pieces of one stream."""
    return [later - earlier for earlier, later in itertools.pairwise(reply.chunk_times_s)]


def time_per_output_token_s(reply: Reply) -> float | None:
    """Return a request's TPOT; None of fewer than two tokens."""
    if reply.num_tokens < 2 or not reply.chunk_times_s:
        return None
    return (reply.ended_s - reply.chunk_times_s[0]) / (reply.num_tokens - 1)


def meets(reply: Reply, slo: Slo) -> bool:
    """Return whether a completed request keeps the SLO; one without any text has no first token and does not."""
    if slo.ttft_s is not None and not (reply.chunk_times_s and reply.chunk_times_s[0] - reply.sent_s <= slo.ttft_s):
        return False
    worst_s = percentile(gaps_s(reply), 0.99)
    return slo.itl_s is None or worst_s is None or worst_s <= slo.itl_s


def _latency(times_s: Sequence[float]) -> Latency | None:
    p50_s, p90_s, p99_s = (percentile(times_s, fraction) for fraction in (0.5, 0.9, 0.99))
    if p50_s is None or p90_s is None or p99_s is None:
        return None
    return Latency(mean_s=statistics.fmean(times_s), p50_s=p50_s, p90_s=p90_s, p99_s=p99_s)
