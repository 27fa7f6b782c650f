"""The router's benchmark on tiny fleets and a clock of its own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.router import LOADS, NUM_WARM_ROUNDS, SITUATIONS, Gateways, RouterBenchOptions, compare, measure, router

TINY = RouterBenchOptions(num_requests=22, num_verifiers=4, num_drafters=2, num_rounds=3, num_routes=5)


def ticking(step_s: float = 1.0):
    """Return a clock on which every call of the router takes `step_s`."""
    times_s = itertools.count(0.0, step_s)
    return lambda: next(times_s)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.name)
def test_only_the_routers_own_time_counts(situation):
    row = measure(TINY, situation, ticking(0.5))
    assert (row.report_p50_s, row.report_p99_s, row.drafter_report_p50_s) == (0.5, 0.5, 0.5)
    assert (row.route_p50_s, row.affine_route_p50_s) == (0.5, 0.5)
    assert row.decision_s == pytest.approx(4 * 0.5 / 22), "each report is about 5.5 requests"
    assert row.core_share == pytest.approx((4 + 2) * 0.5 / 0.25)


def test_percentiles_lie_between_the_calls():
    calls = (2 * number + edge for number in itertools.count() for edge in (0, 1))
    options = RouterBenchOptions(num_requests=1, num_verifiers=1, num_drafters=1, num_rounds=2, num_routes=2)
    row = measure(options, SITUATIONS[0], lambda: float(next(calls) ** 2))  # call number n takes 4n + 1 s
    first = 2 * NUM_WARM_ROUNDS  # each round has a drafter's report and a verifier's
    assert (row.drafter_report_p50_s, row.report_p50_s) == (4 * (first + 1) + 1, 4 * (first + 2) + 1)
    assert row.report_p99_s == pytest.approx(4 * (first + 1 + 0.99 * 2) + 1)
    assert (row.route_p50_s, row.affine_route_p50_s) == (4 * (first + 5) + 1, 4 * (first + 6) + 1)


def test_situations_are_what_they_say():
    shares = [measure(TINY, situation, ticking()).on_share for situation in SITUATIONS]
    assert shares[0] == 1.0
    assert shares[1] == 0.0


def test_the_verb_prints_and_writes(tmp_path: Path):
    path = tmp_path / "figures.json"
    options = ["--num-requests", "6", "--num-verifiers", "2", "--num-drafters", "1", "--num-rounds", "2"]
    options += ["--num-gateways", "2", "--simulated-verifiers", "4"]
    result = CliRunner().invoke(router, [*options, "--num-routes", "2", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "6 requests on 2 verifiers, 1 drafters" in result.output
    figures = json.loads(path.read_text())
    assert [row["name"] for row in figures["rows"]] == [situation.name for situation in SITUATIONS]
    assert all(row["decision_s"] > 0 for row in figures["rows"])
    assert [row["placed_by"] for row in figures["waits"]] == ["one that knows all", "gateways"] * len(LOADS)
    assert "4 verifiers of 8 requests, 2 gateways" in result.output


def test_gateways_make_requests_wait_little_longer_and_refuse_where_all_is_full():
    gateways = Gateways(num_gateways=10, num_verifiers=20, seconds=9.0)
    for load in (0.8, 2.0):
        knowing, many = compare(gateways, load)
        assert 0.0 < many.p50_s <= 1.5 * knowing.p50_s
        assert many.p99_s <= 1.5 * knowing.p99_s
        assert (many.refused_share > 0.01) == (knowing.refused_share > 0.01) == (load > 1.0)
