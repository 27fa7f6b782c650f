"""`make study NAME=adaptive`: draft lengths decided step by step, beside every fixed one, at every load.

    one engine and one drafter for all arms: nothing but the plans differ
    for a quarter as many repeats:       the fixed arms, whose speeds by concurrency make the per-batch-size table, and
                                         adaptive, which learns as long (first drafts on a cold machine are dearer)
    for each repeat:                     arms ordered as in `outrider bench throughput`
        for each concurrency:
            for each arm: a warm-up that does not count, then `concurrency` prompts at once

Runs are short and many rather than long and few: on a shared machine the ratio of two runs side by side is as noisy
over seconds as over milliseconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click

from benchmarks.adaptive_figures import ADAPTIVE, OFF, PLACEBO, TABLE, Point, compare, plot, report_of
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import numbers, show_progress
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.router.fleet import BatchSizeTable
from outrider.cluster.router.planning import table_length
from outrider.lab.bench.arms import OutriderArm, PlanOf, placed
from outrider.lab.bench.figures import RunTrace, Workload
from outrider.lab.bench.pairs import BenchOptions, pairs, plan_runs, read_prompts
from outrider.lab.report import describe_machine, files
from outrider.verifier_service.messages.request import SpeculationPlan

WARM_UP_TOKENS = 16  # per request: the price of a step follows the last few dozen
PLAIN_WIDTH = 230


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveBench:
    """What is measured."""

    workload: Workload
    concurrencies: tuple[int, ...]
    fixed_lengths: tuple[int, ...]
    max_length: int  # the bound of the adaptive arm
    repeats: int

    @property
    def num_runs(self) -> int:
        num_arms = len(self.fixed_lengths) + 4
        num_tuning_runs = self.tuning_repeats * (len(self.fixed_lengths) + 2)
        return len(self.concurrencies) * (num_tuning_runs + self.repeats * num_arms)

    @property
    def tuning_repeats(self) -> int:
        """Return how often each fixed length runs beforehand, for the table, and adaptive beside them."""
        return max(1, self.repeats // 4)

    def prompts_for(self, concurrency: int, repeat: int) -> Workload:
        """Return the workload of a run: a prompt per request, every repeat going on where the last one ended."""
        prompts, start = self.workload.prompts, repeat * concurrency
        taken = (prompts[(start + place) % len(prompts)] for place in range(concurrency))
        return replace(self.workload, prompts=tuple(taken))


def pinned(length: int) -> PlanOf:
    """Return the plan of a fixed length, whatever the batch."""
    return lambda _: SpeculationPlan(draft_length=length, is_pinned=True)


def by_table(table: BatchSizeTable) -> PlanOf:
    """Return vLLM's plan: a length by the number of requests in the batch."""
    return lambda batch_size: pinned(table_length(table, batch_size))(batch_size)


def priced(max_length: int) -> PlanOf:
    """Return the plan that leaves the length to the price of each step."""
    return lambda _: SpeculationPlan(draft_length=max_length)


def tuned_table(speeds: Mapping[int, Mapping[int, Sequence[float]]]) -> BatchSizeTable:
    """Return, from each batch size measured to the next, the fastest length by {size: {length: tokens/s}}."""
    sizes = sorted(speeds)
    ends = [*(after - 1 for after in sizes[1:]), sizes[-1]]
    best = [max(speeds[size], key=lambda length: statistics.median(speeds[size][length])) for size in sizes]
    rows = zip([1, *sizes[1:]], ends, best, strict=True)
    return tuple(rows)


def measure(arm: OutriderArm, bench: AdaptiveBench, on_run: Callable[[str], None]) -> list[Point]:
    """Run all arms on one engine; return what each concurrency shows."""

    def run_all(plans: Mapping[str, PlanOf], repeats: int, label: str = "") -> dict[tuple[int, str], list[RunTrace]]:
        traces: dict[tuple[int, str], list[RunTrace]] = {}
        for repeat, concurrency, name in plan_runs(list(plans), bench.concurrencies, repeats):
            on_run(f"{name}{label}, concurrency {concurrency}")
            workload = bench.prompts_for(concurrency, repeat)
            short = replace(workload, max_tokens=min(WARM_UP_TOKENS, workload.max_tokens))
            arm.run(short, concurrency, plans[name])
            traces.setdefault((concurrency, name), []).append(arm.run(workload, concurrency, plans[name]))
        return traces

    lengths = {OFF: 0} | {f"K = {length}": length for length in bench.fixed_lengths}
    fixed = {name: pinned(length) for name, length in lengths.items()}
    tuning = run_all(fixed | {ADAPTIVE: priced(bench.max_length)}, bench.tuning_repeats, ", tuning")
    found = {
        concurrency: {length: list(map(speed, tuning[concurrency, name])) for name, length in lengths.items()}
        for concurrency in bench.concurrencies
    }
    plans = fixed | {TABLE: by_table(tuned_table(found)), ADAPTIVE: priced(bench.max_length), PLACEBO: pinned(0)}
    traces = run_all(plans, bench.repeats)
    return [
        compare(
            concurrency,
            {name: [speed(trace) for trace in traces[concurrency, name]] for name in plans},
            {name: statistics.mean(map(drafted, traces[concurrency, name])) for name in plans},
        )
        for concurrency in bench.concurrencies
    ]


def speed(trace: RunTrace) -> float:
    """Return a run's tokens per second until the first of its requests ends: from then on fewer are concurrent.

    What that leaves out is the tail in which those that drew the shorter drafts, or missed a step for one, run alone.
    """
    begin_s = min(request.arrival_s for request in trace.requests)
    end_s = min(request.output_times_s[-1] for request in trace.requests)
    outputs = (zip(request.output_times_s, request.output_sizes, strict=True) for request in trace.requests)
    num_tokens = sum(size for times_and_sizes in outputs for time_s, size in times_and_sizes if time_s <= end_s)
    return num_tokens / (end_s - begin_s)


def drafted(trace: RunTrace) -> float:
    """Return the draft tokens verified per request and step."""
    num_rounds = sum(len(request.output_sizes) for request in trace.requests)
    return trace.drafts.num_draft_tokens / num_rounds


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--concurrency", "concurrencies", default="1,2,4,8,16,32,64", show_default=True, callback=numbers)
@click.option("--lengths", "fixed_lengths", default="2,4,8", show_default=True, callback=numbers, help="Fixed ones.")
@click.option("--max-length", type=click.IntRange(1), default=8, show_default=True, help="Bound of the adaptive arm.")
@click.option("--near", is_flag=True, help="Draft in the verifier's process instead of one with a core of its own.")
@click.option("--inflate", type=click.FloatRange(min=0), default=100e6, show_default=True, help="0: as it is shipped.")
@click.option("--num-prompts", type=click.IntRange(min=1), default=8, show_default=True, help="Different ones.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--repeats", type=click.IntRange(min=2), default=14, show_default=True, help="14 balance 7 arms.")
@files("json", "markdown", "plot")
def adaptive(
    concurrencies: tuple[int, ...],
    fixed_lengths: tuple[int, ...],
    max_length: int,
    near: bool,
    inflate: float,
    num_prompts: int,
    max_tokens: int,
    temperature: float,
    repeats: int,
    json_file: Path | None,
    markdown_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure whether pricing every step is ever slower than the best fixed draft length, on the embedded pair."""
    workload = Workload(prompts=(), max_tokens=max_tokens, temperature=temperature, num_speculative_tokens=max_length)
    bench = AdaptiveBench(
        workload=workload,
        concurrencies=concurrencies,
        fixed_lengths=fixed_lengths,
        max_length=max_length,
        repeats=repeats,
    )
    machine = describe_machine()
    with ExitStack() as stack:
        arm, prompts = stack.enter_context(_opened(bench, num_prompts, int(inflate), is_near=near))
        bench = replace(bench, workload=replace(workload, prompts=prompts))
        on_run = stack.enter_context(show_progress(bench.num_runs))
        points = measure(arm, bench, on_run)
    place = "in the verifier's process" if near else "on a core of its own"
    title = (
        f"Embedded pair, target inflated to {inflate / 1e6:.4g} M, drafter {place}; {max_tokens} tokens a request, "
        f"temperature {temperature:g}, {repeats} interleaved repeats. {machine}."
    )
    report_of(title, points).show(PLAIN_WIDTH, json_file, markdown_file)
    if plot_file is not None:
        plot(points, plot_file)


@contextmanager
def _opened(
    bench: AdaptiveBench, num_prompts: int, inflate_to: int, *, is_near: bool
) -> Iterator[tuple[OutriderArm, tuple[tuple[int, ...], ...]]]:
    """Load engine and drafter once; the inflated target is there until the end."""
    config = ServiceConfig(
        num_speculative_tokens=max(bench.max_length, *bench.fixed_lengths),
        max_num_seqs=max(bench.concurrencies),
        threads_per_rank=1,
        seed=0,
    )
    prompts = read_prompts(config, None)[:num_prompts]
    options = BenchOptions(
        config=config, workload=replace(bench.workload, prompts=prompts), repeats=bench.repeats, inflate_to=inflate_to
    )
    with pairs(options) as named, ExitStack() as opening:
        # all arms find the prompts in the cache: what is compared is decoding
        base = named[-1][1].with_options(enable_prefix_caching=True)
        arm = OutriderArm.open(
            "engine", base, opening, time.perf_counter, drafter_process=not is_near, prices_drafts=True
        )
        with placed(arm.cores, arm.num_threads):
            yield arm, prompts
