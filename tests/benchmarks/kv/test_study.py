"""The study of KV in use, on made-up runs: what is counted of a run, and what is read off the curve."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.adaptive import pinned
from benchmarks.kv.study import OFF, PRICED, BlockMeter, KvPoint, fewest_blocks, full_until_s, rows, run_once, speed
from outrider.lab.bench.figures import DraftCounts, RequestTrace, RunTrace, Workload


def trace_of(*times_s: tuple[float, ...], drafts: DraftCounts | None = None) -> RunTrace:
    requests = tuple(
        RequestTrace(arrival_s=0.0, output_times_s=times, output_sizes=(2,) * len(times), token_ids=())
        for times in times_s
    )
    return RunTrace(elapsed_s=9.0, requests=requests, num_target_steps=4, drafts=drafts or DraftCounts())


def point(tokens_per_s: float, mean_blocks: float, length: float | None = None) -> KvPoint:
    return KvPoint(
        tokens_per_s=tokens_per_s, mean_blocks=mean_blocks, peak_blocks=mean_blocks, preemptions=0.0, length=length
    )


def test_blocks_count_for_as_long_as_their_step():
    times = iter((0.0, 1.0, 4.0))
    blocks = iter((10, 20, 90))
    meter = BlockMeter(lambda: next(blocks), lambda: next(times))
    for phase in ("schedule", "forward", "schedule", "commit", "schedule"):
        meter(phase)
    assert meter.mean(3.0) == pytest.approx((1.0 * 10 + 2.0 * 20) / 3.0)  # the third step is not in it
    assert meter.peak == 90


def test_a_run_counts_while_it_is_full():
    trace = trace_of((1.0, 2.0), (1.0, 3.0), (4.0, 5.0))
    assert full_until_s(trace, 2) == 3.0  # from then on one request is left, and no prompt waits
    assert full_until_s(trace, 3) == 2.0
    assert speed(trace, 2.0) == pytest.approx(3 * 2 / 2.0)


def test_a_run_reads_blocks_and_preemptions_of_its_own_engine():
    scheduler = SimpleNamespace(num_preemptions=5, kv_usage=0.25)
    engine = SimpleNamespace(scheduler=scheduler, on_phase=None)
    asked: list[tuple[int, int]] = []

    class Arm:
        offline = SimpleNamespace(engine=engine, runner=SimpleNamespace(num_blocks=40))

        def run(self, workload: Workload, concurrency: int, plan_of) -> RunTrace:
            asked.append((len(workload.prompts), workload.max_tokens))
            if engine.on_phase is not None:
                engine.on_phase("schedule")
                scheduler.num_preemptions += 1
            return trace_of((1e9,), (2e9,), drafts=DraftCounts(num_drafts=10, num_accepted_tokens=15))

    found = run_once(Arm(), Workload(prompts=((1,), (2,)), max_tokens=64), 1, pinned(4))
    assert asked == [(1, 8), (2, 64)]
    assert found.mean_blocks == pytest.approx(10)  # over the time of a real clock
    assert (found.peak_blocks, found.preemptions, found.length) == (10, 50, 2.5)


def test_blocks_are_read_off_where_drafts_are_as_fast():
    drafted = [point(150, 12, 2.0), point(140, 10, 2.0), point(250, 40, 2.0)]
    assert fewest_blocks(100, drafted) == 10
    assert fewest_blocks(145, drafted) == 12
    assert fewest_blocks(251, drafted) is None
    found = list(rows({8: {OFF: point(260, 90), PRICED: drafted[2]}, 1: {OFF: point(100, 11), PRICED: drafted[1]}}))
    assert [row[-1] for row in found] == ["10.0", "-", "-", "-"]
    assert found[1][:4] == ["1", PRICED, "140", "10.0"]


def test_means_are_over_runs():
    mean = KvPoint.mean([point(100, 10, 2.0), point(200, 30)])
    assert (mean.tokens_per_s, mean.mean_blocks, mean.peak_blocks, mean.length) == (150, 20, 30, 2.0)
