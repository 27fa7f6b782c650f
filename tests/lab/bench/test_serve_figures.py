"""Figures of a load, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from outrider.lab.bench.load import LoadPoint, LoadTrace, Reply
from outrider.lab.bench.serve_figures import Slo, figures_of, meets, time_per_output_token_s
from outrider.verifier_service.messages.request import SpeculationMetrics

QUICK = Reply(
    sent_s=1.0,
    chunk_times_s=(1.1, 1.2, 1.3),
    ended_s=1.5,
    num_tokens=5,
    drafts=SpeculationMetrics(num_drafts=2, num_draft_tokens=8, num_accepted_tokens=3),
)
SLOW = Reply(sent_s=2.0, chunk_times_s=(2.5, 3.5), ended_s=3.5, num_tokens=2)
FAILED = Reply(sent_s=0.0, chunk_times_s=(9.0,), ended_s=9.0, num_tokens=1, error="HTTP 503: busy")


def trace(*replies: Reply, elapsed_s: float = 2.0) -> LoadTrace:
    return LoadTrace(point=LoadPoint(concurrency=2), elapsed_s=elapsed_s, replies=replies)


def test_the_figures_are_those_of_their_definitions():
    figures = figures_of(trace(QUICK, SLOW), Slo())
    assert (figures.num_requests, figures.num_completed, figures.num_within_slo) == (2, 2, 2)
    assert figures.tokens_per_s == figures.goodput_tokens_per_s == 3.5
    assert figures.requests_per_s == 1.0
    assert figures.ttft is not None
    assert figures.ttft.mean_s == pytest.approx(0.3)
    assert figures.ttft.p99_s == pytest.approx(0.496)
    assert figures.itl is not None
    assert figures.itl.p50_s == pytest.approx(0.1)  # of 0.1, 0.1, 1.0
    assert figures.tpot is not None
    assert figures.tpot.mean_s == pytest.approx((0.4 / 4 + 1.0) / 2)
    assert figures.e2el is not None
    assert figures.e2el.p50_s == pytest.approx(1.0)
    assert figures.acceptance_rate == 3 / 8
    assert figures.mean_acceptance_length == 2.5


def test_an_error_counts_as_an_error_and_in_nothing_else():
    with_errors = figures_of(trace(QUICK, FAILED, FAILED), Slo())
    without = figures_of(trace(QUICK), Slo())
    assert with_errors.errors == {"HTTP 503: busy": 2}
    assert (with_errors.num_requests, with_errors.num_completed) == (3, 1)
    assert with_errors.tokens_per_s == without.tokens_per_s
    assert (with_errors.ttft, with_errors.itl, with_errors.e2el) == (without.ttft, without.itl, without.e2el)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), (True, True)),
        (Slo(ttft_s=0.2), (True, False)),
        (Slo(ttft_s=0.05), (False, False)),
        (Slo(itl_s=0.5), (True, False)),
        (Slo(ttft_s=0.6, itl_s=0.05), (False, False)),
    ],
)
def test_goodput_is_the_throughput_of_requests_that_keep_every_bound(slo: Slo, good: tuple[bool, bool]):
    assert (meets(QUICK, slo), meets(SLOW, slo)) == good
    figures = figures_of(trace(QUICK, SLOW), slo)
    assert figures.num_within_slo == sum(good)
    assert figures.goodput_tokens_per_s == (5 * good[0] + 2 * good[1]) / 2.0
    assert figures.tokens_per_s == 3.5


def test_nothing_completed_is_no_figure_rather_than_zero():
    figures = figures_of(trace(FAILED), Slo(ttft_s=1.0))
    assert (figures.ttft, figures.itl, figures.tpot, figures.e2el, figures.acceptance_rate) == (None,) * 5
    assert figures.tokens_per_s == 0.0


def test_a_reply_without_text_meets_no_bound_on_its_first_token():
    silent = Reply(sent_s=0.0, ended_s=1.0)
    assert meets(silent, Slo(itl_s=1.0))
    assert not meets(silent, Slo(ttft_s=10.0))
    assert time_per_output_token_s(silent) is None
