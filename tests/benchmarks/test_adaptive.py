"""Whether adaptive is ever worse: the comparison on made-up speeds, the table, a whole run with a played engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.adaptive import (
    AdaptiveBench,
    by_table,
    measure,
    speed,
    tuned_table,
)
from benchmarks.adaptive_figures import ADAPTIVE, OFF, PLACEBO, TABLE, compare, plot, report_of
from outrider.lab.bench.arms import PlanOf
from outrider.lab.bench.figures import RequestTrace, RunTrace, Workload
from outrider.verifier_service.messages.request import SpeculationMetrics

NO_LENGTHS = {ADAPTIVE: 1.0}
WORKLOAD = Workload(prompts=((1, 2), (3,)), max_tokens=20)
BENCH = AdaptiveBench(workload=WORKLOAD, concurrencies=(1, 4), fixed_lengths=(2, 4), max_length=8, repeats=2)


def noisy(mean: float, num: int = 40, spread: float = 0.02, seed: int = 0) -> list[float]:
    return list(mean * (1.0 + spread * np.random.default_rng(seed).standard_normal(num)))


def test_one_that_is_as_good_is_never_worse_and_one_that_is_not_is_found_out():
    arms = {OFF: noisy(100, seed=1), PLACEBO: noisy(100, seed=4), "K = 2": noisy(120, seed=2)}
    good = compare(1, arms | {ADAPTIVE: noisy(120, seed=3)}, NO_LENGTHS)
    assert (good.best, good.is_never_worse) == ("K = 2", True)
    assert 0.97 < good.over_best.low < 1.0 < good.over_best.high
    bad = compare(1, arms | {ADAPTIVE: noisy(110, seed=3)}, NO_LENGTHS)
    assert not bad.is_never_worse
    assert bad.over_off.low > 1.05
    assert bad.placebo.low < 1.0 < bad.placebo.high


def test_slower_than_none_is_worse_even_where_none_is_the_best():
    off = noisy(100, spread=0.001)
    point = compare(1, {OFF: off, PLACEBO: off, ADAPTIVE: noisy(98, spread=0.001, seed=5)}, NO_LENGTHS)
    assert point.best == OFF
    assert point.placebo.median == 1.0
    assert point.over_best.low > 0.97
    assert not point.is_never_worse


def test_the_best_of_many_equals_has_no_advantage_from_being_picked():
    """With ten arms that differ in noise alone the best figure is high; judged on the other half it is not."""
    arms = {f"K = {k}": noisy(100, num=8, spread=0.1, seed=k) for k in range(10)}
    arms |= {OFF: noisy(100, 8, 0.1, 77), PLACEBO: noisy(200, 8, 0.1, 78)}
    adaptive = noisy(100, num=8, spread=0.001, seed=99)
    point = compare(1, arms | {ADAPTIVE: adaptive}, NO_LENGTHS)
    assert point.best != PLACEBO, "it is no fixed arm to beat"
    naive = np.mean(adaptive) / max(np.mean(values) for name, values in arms.items() if name != PLACEBO)
    assert point.over_best.median > naive
    assert point.over_best.low < 1.0 < point.over_best.high


def test_a_table_has_the_best_length_of_every_size_until_the_next():
    speeds = {
        1: {0: [1.0], 2: [2.0], 4: [3.0]},
        4: {0: [1.0, 1.0, 9.0], 2: [1.5, 1.4, 0.1], 4: [1.2, 1.3, 1.1]},  # the medians count
        16: {0: [9.0], 2: [1.0], 4: [1.0]},
    }
    table = tuned_table(speeds)
    assert table == ((1, 3, 4), (4, 15, 2), (16, 16, 0))
    lengths = [by_table(table)(size).draft_length for size in (1, 3, 4, 15, 16, 500)]
    assert lengths == [4, 4, 2, 2, 0, 0]


def trace_of(num_tokens: int, elapsed_s: float, num_draft_tokens: int = 0) -> RunTrace:
    request = RequestTrace(
        arrival_s=0.0, output_times_s=(0.1, elapsed_s), output_sizes=(1, num_tokens - 1), token_ids=(7,) * num_tokens
    )
    return RunTrace(
        elapsed_s=elapsed_s,
        requests=(request,),
        num_target_steps=2,
        drafts=SpeculationMetrics(num_draft_tokens=num_draft_tokens),
    )


def test_speed_is_that_of_the_steps_which_all_requests_are_in():
    """One ends after 2 s, the other has half of its tokens then."""
    quick = RequestTrace(arrival_s=1.0, output_times_s=(2.0, 3.0), output_sizes=(4, 4), token_ids=(7,) * 8)
    slow = RequestTrace(arrival_s=1.0, output_times_s=(2.0, 3.0, 9.0), output_sizes=(2, 2, 4), token_ids=(7,) * 8)
    trace = RunTrace(elapsed_s=8.0, requests=(quick, slow), num_target_steps=3)
    assert speed(trace) == (8 + 4) / 2.0


class PlayedArm:
    """An engine whose speed depends on the plan alone: 2 tokens are best alone, none with four."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []

    def run(self, workload: Workload, concurrency: int, plan_of: PlanOf) -> RunTrace:
        plan = plan_of(concurrency)
        self.calls.append((concurrency, plan.draft_length, plan.is_pinned))
        best = 2 if concurrency == 1 else 0
        length = plan.draft_length if plan.is_pinned else best
        return trace_of(20, 1.0 + 0.1 * abs(length - best), num_draft_tokens=length)


def test_a_run_tunes_the_table_and_compares_all_arms(tmp_path):
    arm, heard = PlayedArm(), []
    alone, four = measure(arm, BENCH, heard.append)
    assert len(heard) == BENCH.num_runs
    assert len(arm.calls) == 2 * len(heard), "each after a warm-up"
    assert list(alone.tokens_per_s) == [OFF, "K = 2", "K = 4", TABLE, ADAPTIVE, PLACEBO]
    assert alone.tokens_per_s[TABLE] == alone.tokens_per_s["K = 2"] == alone.tokens_per_s[ADAPTIVE] == (20.0, 20.0)
    assert four.tokens_per_s[TABLE] == four.tokens_per_s[OFF] == (20.0, 20.0)
    assert alone.placebo.median == 1.0
    assert alone.is_never_worse
    assert four.is_never_worse
    page = report_of("title", [alone, four]).to_markdown()
    assert "| 1 |" in page
    assert "NO" not in page
    assert "NO" in report_of("title", [replace(four, over_off=replace(four.over_off, high=0.9))]).to_markdown()
    assert report_of("title", [alone]).to_json()["points"][0]["over_best"]["median"] == 1.0
    plot([alone, four], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
