"""The benchmark's arithmetic, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.lab.bench.figures import (
    LIBRARY,
    OFF,
    Figures,
    Measurement,
    RequestTrace,
    RunTrace,
    answer_pairs,
    figures_of,
    median_figures,
    percentile,
    rows_of,
)
from outrider.verifier_service.messages.request import SpeculationMetrics

# arrives at 10, first token at 10.5, then 4 tokens after 2 s, then 1 after 1 s
EARLY = RequestTrace(
    arrival_s=10.0, output_times_s=(10.5, 12.5, 13.5), output_sizes=(1, 4, 1), token_ids=(7, 1, 2, 3, 4, 5)
)
LATE = RequestTrace(arrival_s=11.0, output_times_s=(12.5, 14.5), output_sizes=(2, 2), token_ids=(9, 8, 7, 6))
DRAFTS = SpeculationMetrics(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=5, num_empty_rounds=3)
RUN = RunTrace(elapsed_s=4.0, requests=(EARLY, LATE), num_target_steps=6, drafts=DRAFTS)


def run(speed: float, tokens: tuple[int, ...] = (1, 2)) -> RunTrace:
    """A run of one request at `speed` tokens/s."""
    request = RequestTrace(arrival_s=0.0, output_times_s=(1.0,), output_sizes=(len(tokens),), token_ids=tokens)
    return RunTrace(elapsed_s=len(tokens) / speed, requests=(request,), num_target_steps=1)


def measurement(arm: str, repeat: int, trace: RunTrace, concurrency: int = 1) -> Measurement:
    return Measurement(
        arm=arm, num_threads=1, concurrency=concurrency, repeat=repeat, trace=trace, read_bytes_per_s=1.0
    )


def test_percentiles_by_hand() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert percentile(list(range(101)), 0.99) == 99


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_among_the_values(values: list[float], fraction: float) -> None:
    found = percentile(values, fraction)
    assert found is not None
    assert min(values) <= found <= max(values) * (1 + 1e-12)


def test_an_inter_token_time_is_the_gap_shared_by_the_tokens_it_brought() -> None:
    assert EARLY.inter_token_times_s == [2.0 / 4, 1.0 / 1]
    assert EARLY.time_to_first_token_s == 0.5


def test_figures_by_hand() -> None:
    figures = figures_of(RUN, weight_bytes=100, read_bytes_per_s=500.0)
    assert figures.tokens_per_s == 10 / 4.0
    assert figures.acceptance_rate == 5 / 8
    assert figures.mean_acceptance_length == 1 + 5 / 2
    assert figures.time_to_first_token_p50_s == (0.5 + 1.5) / 2
    assert figures.inter_token_p50_s == 1.0  # of 0.5, 1, 1
    assert figures.inter_token_p99_s == 1.0
    assert figures.bandwidth_share == pytest.approx(100 * 6 / 4.0 / 500.0)
    assert (figures.num_target_steps, figures.num_empty_rounds) == (6, 3)


def test_what_was_not_there_is_not_zero() -> None:
    figures = figures_of(run(2.0), weight_bytes=1, read_bytes_per_s=1.0)
    assert figures.acceptance_rate is None
    assert figures.mean_acceptance_length is None
    assert figures.inter_token_p99_s is None


def test_medians_are_taken_figure_by_figure() -> None:
    base = figures_of(RUN, weight_bytes=100, read_bytes_per_s=500.0)
    repeats = [
        dataclasses.replace(base, tokens_per_s=speed, bandwidth_share=share, acceptance_rate=None)
        for speed, share in ((1.0, 0.9), (5.0, 0.1), (2.0, 0.5))
    ]
    median = median_figures(repeats)
    assert isinstance(median, Figures)
    assert (median.tokens_per_s, median.bandwidth_share, median.acceptance_rate) == (2.0, 0.5, None)


def test_a_ratio_compares_within_a_repeat() -> None:
    # the machine halves its speed after the first repeat: medians of speeds would say 20 / 10
    speeds = {"plain": (10.0, 5.0, 10.0), "ours": (30.0, 15.0, 20.0)}
    found = [measurement(arm, repeat, run(speed)) for arm in speeds for repeat, speed in enumerate(speeds[arm])]
    rows = {row.arm: row for row in rows_of("pair", found, 1, baseline="plain", compare=True)}
    assert rows["plain"].ratio == 1.0
    assert rows["ours"].ratio == 3.0  # of 3, 3, 2
    assert rows["ours"].figures.tokens_per_s == 20.0
    assert [one.tokens_per_s for one in rows["ours"].repeats] == pytest.approx([30.0, 15.0, 20.0])


def test_a_ratio_is_to_the_same_concurrency() -> None:
    found = [
        measurement("plain", 0, run(10.0), concurrency=1),
        measurement("ours", 0, run(20.0), concurrency=1),
        measurement("plain", 0, run(40.0), concurrency=4),
        measurement("ours", 0, run(20.0), concurrency=4),
    ]
    rows = rows_of("pair", found, 1, baseline="plain", compare=True)
    assert [(row.concurrency, row.arm, row.ratio) for row in rows] == [
        (1, "plain", 1.0),
        (1, "ours", 2.0),
        (4, "plain", 1.0),
        (4, "ours", 0.5),
    ]


def test_without_a_baseline_there_is_nothing_to_compare_with() -> None:
    (row,) = rows_of("pair", [measurement("ours", 0, run(1.0))], 1, baseline="plain", compare=True)
    assert row.ratio is None
    assert row.first_differences is None


def test_a_prompt_that_differs_in_any_repeat_is_reported() -> None:
    found = [
        *(measurement(OFF, repeat, run(1.0, (5, 6, 7))) for repeat in range(3)),
        measurement("ours", 0, run(1.0, (5, 6, 7))),
        measurement("ours", 1, run(1.0, (5, 6, 0))),
        measurement("ours", 2, run(1.0, (5, 0, 7))),
    ]
    rows = rows_of("pair", found, 1, baseline=OFF, compare=True)
    assert [row.first_differences for row in rows] == [{}, {0: 1}]
    assert [row.first_differences for row in rows_of("pair", found, 1, baseline=OFF, compare=False)] == [None] * 2


def test_answers_of_our_own_arms_are_paired_with_plain_decodings() -> None:
    found = [
        measurement(LIBRARY, 0, run(1.0, (9,))),
        measurement(OFF, 0, run(1.0, (5, 6)), concurrency=4),
        measurement(OFF, 0, run(1.0, (5, 7)), concurrency=1),
    ]
    first, second = answer_pairs("as given", found, [(3, 4)])
    assert (first.what, first.prompt) == (f"as given, concurrency 4, {OFF}, prompt 1", (3, 4))
    assert (first.expected, first.given) == ((5, 7), (5, 6))
    assert second.expected == second.given == (5, 7)
    assert answer_pairs("as given", found[:1], [(3, 4)]) == []


def test_tokens_are_compared_with_the_smallest_batch() -> None:
    found = [
        measurement(OFF, 0, run(1.0, (5, 6)), concurrency=4),
        measurement(OFF, 0, run(1.0, (5, 7)), concurrency=1),
    ]
    rows = rows_of("pair", found, 1, baseline=OFF, compare=True)
    assert [(row.concurrency, row.first_differences) for row in rows] == [(4, {0: 1}), (1, {})]
