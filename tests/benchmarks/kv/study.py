"""`make study NAME=kv`: the KV blocks that an engine uses at so many tokens per second, with drafts and without.

    one engine, one drafter in its process, a bounded pool of KV blocks, no prefix cache
    a run over all prompts with drafts, so that look-ups know every answer from the first measured run on
    for each repeat, for each concurrency, for each arm in turn:
        a warm-up that does not count, then a queue of prompts, `concurrency` of them at a time

A run counts until the first moment at which fewer requests than that are left. Blocks are those in use while a step
runs, those of its drafts included, each for as long as the step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.adaptive import PLAIN_WIDTH, pinned, priced
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table, numbers, show_progress

if TYPE_CHECKING:
    from outrider.lab.bench.arms import OutriderArm, PlanOf
    from outrider.lab.bench.figures import RunTrace, Workload

OFF, FIXED, PRICED, PLACEBO = "no drafts", "K = {}", "priced", "no drafts again"
ROUNDS = 2  # prompts of a run, for each request at a time
WARM_UP_TOKENS = 8
KV_BYTES = 128 * 98_304  # 128 blocks of the embedded target's KV
HEADINGS = (
    "requests",
    "drafts",
    "tokens/s",
    "blocks, mean",
    "peak",
    "preempted per 100",
    "length",
    "at those tokens/s",
)


@dataclass(slots=True)
class BlockMeter:
    """Blocks in use, step by step: called with each phase of a step, it looks when a step has been scheduled."""

    read: Callable[[], int]
    clock: Callable[[], float]
    samples: list[tuple[float, int]] = field(default_factory=list)  # when a step began, blocks

    def __call__(self, phase: str) -> None:
        if phase == "schedule":
            self.samples.append((self.clock(), self.read()))

    def mean(self, end_s: float) -> float:
        """Return the mean until `end_s`, each sample weighted by the time until the next."""
        kept = [sample for sample in self.samples if sample[0] < end_s]
        ends = [*(at_s for at_s, _ in kept[1:]), end_s]
        parts = [(stop_s - at_s, blocks) for (at_s, blocks), stop_s in zip(kept, ends, strict=True)]
        return sum(span_s * blocks for span_s, blocks in parts) / sum(span_s for span_s, _ in parts)

    @property
    def peak(self) -> int:
        return max(blocks for _, blocks in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPoint:
    """One run, or the means of several."""

    tokens_per_s: float
    mean_blocks: float
    peak_blocks: float
    preemptions: float  # per 100 requests
    length: float | None  # tokens per verification of a draft; None: nothing was drafted

    @classmethod
    def mean(cls, points: Sequence[KvPoint]) -> KvPoint:
        lengths = [point.length for point in points if point.length is not None]
        return cls(
            tokens_per_s=statistics.mean(point.tokens_per_s for point in points),
            mean_blocks=statistics.mean(point.mean_blocks for point in points),
            peak_blocks=max(point.peak_blocks for point in points),
            preemptions=statistics.mean(point.preemptions for point in points),
            length=statistics.mean(lengths) if lengths else None,
        )


def full_until_s(trace: RunTrace, concurrency: int) -> float:
    """Return when the run first had fewer requests than it could have."""
    ends_s = sorted(request.output_times_s[-1] for request in trace.requests)
    return ends_s[len(ends_s) - concurrency]


def speed(trace: RunTrace, end_s: float) -> float:
    """Return the tokens per second until then."""
    outputs = [
        pair for request in trace.requests for pair in zip(request.output_times_s, request.output_sizes, strict=True)
    ]
    begin_s = min(request.arrival_s for request in trace.requests)
    return sum(size for at_s, size in outputs if at_s <= end_s) / (end_s - begin_s)


def run_once(arm: OutriderArm, workload: Workload, concurrency: int, plan_of: PlanOf) -> KvPoint:
    """Run a queue of prompts and read its blocks."""
    engine, pool = arm.offline.engine, arm.offline.runner.num_blocks
    arm.run(replace(workload, max_tokens=WARM_UP_TOKENS, prompts=workload.prompts[:concurrency]), concurrency, plan_of)
    meter = BlockMeter(lambda: round(engine.scheduler.kv_usage * pool), time.perf_counter)
    first_preemption, engine.on_phase = engine.scheduler.num_preemptions, meter
    trace = arm.run(workload, concurrency, plan_of)
    engine.on_phase = lambda phase: None
    end_s = full_until_s(trace, concurrency)
    drafts = trace.drafts
    return KvPoint(
        tokens_per_s=speed(trace, end_s),
        mean_blocks=meter.mean(end_s),
        peak_blocks=meter.peak,
        preemptions=100 * (engine.scheduler.num_preemptions - first_preemption) / len(trace.requests),
        length=1 + drafts.num_accepted_tokens / drafts.num_drafts if drafts.num_drafts else None,
    )


def fewest_blocks(tokens_per_s: float, points: Iterable[KvPoint]) -> float | None:
    """Return the fewest blocks of the points that are at least as fast; None: none is."""
    return min((point.mean_blocks for point in points if point.tokens_per_s >= tokens_per_s), default=None)


def rows(points: Mapping[int, Mapping[str, KvPoint]]) -> Iterator[list[str]]:
    """Yield a row for each concurrency and arm; without drafts also the fewest blocks at which drafts are as fast."""
    drafted = [arms[PRICED] for arms in points.values()]
    for concurrency, arms in sorted(points.items()):
        for name, point in arms.items():
            fewest = fewest_blocks(point.tokens_per_s, drafted) if point.length is None else None
            cells = [str(concurrency), name, f"{point.tokens_per_s:.0f}", f"{point.mean_blocks:.1f}"]
            cells += [f"{point.peak_blocks:.0f}", f"{point.preemptions:.0f}"]
            cells += ["-" if point.length is None else f"{point.length:.2f}"]
            yield [*cells, "-" if fewest is None else f"{fewest:.1f}"]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--concurrency", "concurrencies", default="1,2,4,8,16", show_default=True, callback=numbers)
@click.option("--method", default="eagle3", show_default=True, help="Of the drafter in the verifier's process.")
@click.option("--length", type=click.IntRange(min=1), default=4, show_default=True, help="Of drafts, at most.")
@click.option("--kv-bytes", type=click.IntRange(min=1), default=KV_BYTES, show_default=True, help="Of the pool.")
@click.option("--inflate", type=click.FloatRange(min=0), default=100e6, show_default=True, help="0: as it is shipped.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def kv(
    concurrencies: tuple[int, ...],
    method: str,
    length: int,
    kv_bytes: int,
    inflate: float,
    max_tokens: int,
    repeats: int,
    markdown_file: Path | None,
) -> None:
    """Measure the KV blocks in use at so many tokens per second, with drafts and without, in a bounded pool."""
    from outrider.cluster.config.machine import usable_cores
    from outrider.cluster.config.service_config import ServiceConfig
    from outrider.lab.bench.arms import OutriderArm
    from outrider.lab.bench.figures import Workload
    from outrider.lab.bench.pairs import BenchOptions, describe_machine, pairs, plan_runs, read_prompts

    config = ServiceConfig(
        speculative_config={"method": method, "location": "verifier"},
        num_speculative_tokens=length,
        max_num_seqs=max(concurrencies),
        threads_per_rank=usable_cores(),
        seed=0,
    )
    prompts = read_prompts(config, None)
    workload = Workload(prompts=prompts, max_tokens=max_tokens, num_speculative_tokens=length)
    plans = {OFF: pinned(0), FIXED.format(length): pinned(length), PRICED: priced(length), PLACEBO: pinned(0)}
    machine, found = describe_machine(), {}
    options = BenchOptions(config=config, workload=workload, repeats=repeats, inflate_to=int(inflate))
    with ExitStack() as opening:
        named = opening.enter_context(pairs(options))
        base = named[-1][1].with_options(kv_cache_memory_bytes=kv_bytes)
        arm = OutriderArm.open("kv", base, opening, time.perf_counter, prices_drafts=True)
        on_run = opening.enter_context(show_progress(repeats * len(concurrencies) * len(plans)))
        arm.run(workload, max(concurrencies), plans[PRICED])
        for _, concurrency, name in plan_runs([*plans], concurrencies, repeats):
            on_run(f"{name}, {concurrency} requests")
            taken = tuple(itertools.islice(itertools.cycle(prompts), ROUNDS * concurrency))
            point = run_once(arm, replace(workload, prompts=taken), concurrency, plans[name])
            found.setdefault(concurrency, {}).setdefault(name, []).append(point)
        pool, size = arm.offline.runner.num_blocks, base.model.block_size
    points = {at: {name: KvPoint.mean(arms[name]) for name in plans} for at, arms in found.items()}
    title = (
        f"The embedded target, inflated to {inflate / 1e6:.4g} M, drafter {method}; {pool} KV blocks of {size} tokens, "
        f"{max_tokens} tokens a request, temperature 0, {repeats} interleaved repeats. {machine}."
    )
    page = "\n".join([title, "", *markdown_table(HEADINGS, list(rows(points)))])
    console_of(PLAIN_WIDTH).print(page, highlight=False, markup=False)
    if markdown_file is not None:
        markdown_file.write_text(page + "\n")
