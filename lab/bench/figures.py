"""What a benchmark run leaves behind, and the arithmetic from there to the lines of a table. Pure Python.

tokens/s                committed tokens / elapsed time, prefill included
ratio                   tokens/s over the baseline arm's in the same repeat (same pair, same concurrency); the median
acceptance rate         accepted / draft tokens verified
mean acceptance length  1 + accepted / verifications with a draft
time to first token     from the moment the request may start to its first output; p50 over requests
inter-token time        gap between two outputs of one request / number of tokens in the later one; one sample per
                        output after the first, p50 and p99 over all requests
bandwidth share         weight bytes of one target forward x target forwards / elapsed time, over the speed at which
                        this machine read a large tensor with as many threads in the same repeat. The drafter's
                        reads, KV and activations are left out. A target that stays in the CPU's cache can exceed 1.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.lab.report import Machine
from outrider.lab.same_tokens import Pair, Tally, first_difference
from outrider.verifier_service.messages.request import SpeculationMetrics

# the arms
LIBRARY = "transformers generate"
LIBRARY_ASSISTED = "transformers assisted"
OFF = "Outrider off"
SHARED = "Outrider, cores shared"  # drafter and verifier take turns on all cores, in one process
APART = "Outrider, a core each"  # the drafter in a process of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What every arm is given."""

    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    temperature: float = 0.0
    num_speculative_tokens: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """When the tokens of one request came: `output_times_s[i]` brought `output_sizes[i]` of `token_ids`."""

    arrival_s: float
    output_times_s: tuple[float, ...]
    output_sizes: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def time_to_first_token_s(self) -> float:
        return self.output_times_s[0] - self.arrival_s

    @property
    def inter_token_times_s(self) -> list[float]:
        gaps = (later - earlier for earlier, later in itertools.pairwise(self.output_times_s))
        return [gap / size for gap, size in zip(gaps, self.output_sizes[1:], strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTrace:
    """One arm's run over the whole workload at one concurrency."""

    elapsed_s: float
    requests: tuple[RequestTrace, ...]  # in the order of the prompts
    num_target_steps: int  # forwards of the target model
    drafts: SpeculationMetrics = field(default_factory=SpeculationMetrics)  # of all requests together

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.elapsed_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A run and where it stands in the benchmark."""

    arm: str
    num_threads: int
    concurrency: int
    repeat: int
    trace: RunTrace
    read_bytes_per_s: float  # the machine's, with the arm's number of threads, in this repeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run shows; None: there was nothing to measure it by."""

    tokens_per_s: float
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    time_to_first_token_p50_s: float
    inter_token_p50_s: float | None
    inter_token_p99_s: float | None
    bandwidth_share: float
    num_target_steps: float
    num_empty_rounds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table: medians over the repeats."""

    pair: str
    concurrency: int
    arm: str
    ratio: float | None  # None: the baseline was not measured
    figures: Figures
    repeats: tuple[Figures, ...]
    first_differences: Mapping[int, int] | None  # prompt -> first differing token; None: nothing to compare with


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Everything a report is made of."""

    machine: Machine
    target: str
    draft: str | None
    baseline: str  # the arm that ratios refer to
    workload: Workload
    repeats: int
    read_bytes_per_s: Mapping[int, float]  # threads -> median over the repeats
    rows: tuple[Row, ...]
    tallies: tuple[Tally, ...] = ()  # of each pair, our arms' tokens beside plain decoding's
    notes: tuple[str, ...] = field(default=())


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Return the value below which `fraction` of the values lie, interpolated linearly; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def figures_of(trace: RunTrace, weight_bytes: int, read_bytes_per_s: float) -> Figures:
    """Compute one run's figures; `weight_bytes` are read by one forward of the target."""
    drafts = trace.drafts
    inter_token_s = [seconds for request in trace.requests for seconds in request.inter_token_times_s]
    first_token_s = percentile([request.time_to_first_token_s for request in trace.requests], 0.5)
    assert first_token_s is not None, "a run has requests"
    return Figures(
        tokens_per_s=trace.tokens_per_s,
        acceptance_rate=drafts.draft_acceptance_rate,
        mean_acceptance_length=drafts.mean_acceptance_length,
        time_to_first_token_p50_s=first_token_s,
        inter_token_p50_s=percentile(inter_token_s, 0.5),
        inter_token_p99_s=percentile(inter_token_s, 0.99),
        bandwidth_share=weight_bytes * trace.num_target_steps / trace.elapsed_s / read_bytes_per_s,
        num_target_steps=trace.num_target_steps,
        num_empty_rounds=drafts.num_empty_rounds,
    )


def median_figures(repeats: Sequence[Figures]) -> Figures:
    """Return the median of each figure by itself, over the repeats in which it could be measured."""
    columns = {entry.name: [getattr(one, entry.name) for one in repeats] for entry in dataclasses.fields(Figures)}
    medians: dict[str, Any] = {
        name: percentile([value for value in values if value is not None], 0.5) for name, values in columns.items()
    }
    return Figures(**medians)


def rows_of(
    pair: str, measurements: Sequence[Measurement], weight_bytes: int, *, baseline: str, compare: bool
) -> list[Row]:
    """Make a table line of every arm at every concurrency, in the order of their first measurement.

    With `compare`, tokens are compared with those of our own plain decoding, the arm `OFF`.
    """
    cells: dict[tuple[int, str], list[Measurement]] = {}
    for measurement in measurements:
        cells.setdefault((measurement.concurrency, measurement.arm), []).append(measurement)
    reference = _plain(measurements) if compare else None
    return [
        _row(pair, cell, cells.get((concurrency, baseline)), weight_bytes, reference)
        for (concurrency, _), cell in cells.items()
    ]


def _plain(measurements: Sequence[Measurement]) -> RunTrace | None:
    """Return plain decoding's first run at the smallest concurrency."""
    runs = [measurement for measurement in measurements if measurement.arm == OFF]
    return min(runs, key=lambda run: (run.concurrency, run.repeat)).trace if runs else None


def answer_pairs(pair: str, measurements: Sequence[Measurement], prompts: Sequence[Sequence[int]]) -> list[Pair]:
    """Return every answer of our own arms beside plain decoding's; another library's may be other ones."""
    plain = _plain(measurements)
    return [
        Pair(
            what=f"{pair}, concurrency {run.concurrency}, {run.arm}, prompt {index + 1}",
            prompt=prompt,
            expected=plain.requests[index].token_ids,
            given=run.trace.requests[index].token_ids,
        )
        for run in measurements
        for index, prompt in enumerate(prompts)
        if plain is not None and run.arm not in (LIBRARY, LIBRARY_ASSISTED)
    ]


def _row(
    pair: str,
    cell: Sequence[Measurement],
    baseline: Sequence[Measurement] | None,
    weight_bytes: int,
    reference: RunTrace | None,
) -> Row:
    repeats = tuple(figures_of(run.trace, weight_bytes, run.read_bytes_per_s) for run in cell)
    return Row(
        pair=pair,
        concurrency=cell[0].concurrency,
        arm=cell[0].arm,
        ratio=_ratio(cell, baseline) if baseline else None,
        figures=median_figures(repeats),
        repeats=repeats,
        first_differences=None if reference is None else dict(_differences(cell, reference)),
    )


def _ratio(cell: Sequence[Measurement], baseline: Sequence[Measurement]) -> float:
    """Compare repeat by repeat, so that a machine that slows down in between slows both sides."""
    expected = {run.repeat: run.trace.tokens_per_s for run in baseline}
    return statistics.median(run.trace.tokens_per_s / expected[run.repeat] for run in cell)


def added(metrics: Iterable[SpeculationMetrics]) -> SpeculationMetrics:
    """Return the counts of several requests or runs together."""
    return functools.reduce(SpeculationMetrics.plus, metrics, SpeculationMetrics())


def _differences(cell: Sequence[Measurement], reference: RunTrace) -> Iterator[tuple[int, int]]:
    """Yield each prompt whose tokens differ in any repeat, with the earliest place."""
    for prompt, expected in enumerate(reference.requests):
        places = [first_difference(run.trace.requests[prompt].token_ids, expected.token_ids) for run in cell]
        if found := [place for place in places if place is not None]:
            yield prompt, min(found)
