from __future__ import annotations

import dataclasses

import pytest
from click.testing import CliRunner

from benchmarks.ahead import (
    APART,
    OFF,
    SHARED,
    ahead_arm,
    arm_configs,
    best_ahead,
    rows,
    to_markdown,
    verdict,
)
from benchmarks.ahead_figures import AheadModel, AheadRun, fit, median
from benchmarks.study import study
from outrider.cluster.config.service_config import ServiceConfig
from outrider.lab.bench.figures import Machine, Workload
from outrider.lab.bench.pairs import BenchOptions

MODEL = AheadModel(
    verify_s=0.04,
    verify_shared_s=0.03,
    cost=0.05,
    num_forwards=4.0,
    num_miss_forwards=2.0,
    hit_rate=0.75,
    tokens_per_round=3.0,
    tokens_per_ahead_round=2.8,
)


def run_of(*, elapsed_s: float = 2.0, busy_s: float = 1.6, **counts: int) -> AheadRun:
    return AheadRun(
        elapsed_s=elapsed_s,
        busy_s=busy_s,
        num_tokens=100,
        num_steps=40,
        num_drafts=38,
        num_draft_tokens=152,
        num_accepted_tokens=76,
        **counts,
    )


RUNS = {
    OFF: [run_of(elapsed_s=4.0)],
    SHARED: [run_of(elapsed_s=1.9, busy_s=1.9)],
    APART: [run_of()],
    ahead_arm(1): [run_of(elapsed_s=1.9, num_hits=20, num_misses=18)],
    ahead_arm(4): [run_of(elapsed_s=1.7, num_hits=30, num_misses=8, num_ahead_tokens=600)],
}


def test_figures_of_a_run():
    run = run_of(num_hits=30, num_misses=10, num_ahead_tokens=250)
    assert run.token_s == pytest.approx(0.02)
    assert run.tokens_per_round == 2.5
    assert run.hit_rate == 0.75
    assert run.idle_share == pytest.approx(0.2)
    assert run.idle_per_round_s == pytest.approx(0.01)
    assert run.acceptance_rate == 0.5
    assert run.ahead_per_token == 2.5
    assert run_of().hit_rate is None
    assert median([run_of(), run], lambda one: one.hit_rate) == 0.75


def test_the_model_gives_back_what_was_measured():
    model = fit(RUNS[APART], RUNS[ahead_arm(4)], RUNS[SHARED])
    assert model.cost == pytest.approx(0.01 / model.num_forwards / model.verify_s), "10 ms of waiting for a draft"
    cost = model.cost
    assert model.without_s(cost, 0.0) == pytest.approx(model.verify_s / 2.5 + 0.01 / 2.5)
    assert model.colocated_s(cost) == pytest.approx(RUNS[SHARED][0].token_s)
    assert model.ahead_s(cost, 0.0) == pytest.approx((model.verify_s + 0.1 / 40) / 2.5)


def test_from_which_cost_on_running_ahead_wins():
    cost = MODEL.least_cost(0.0)
    assert cost is not None
    assert MODEL.ahead_s(cost, 0.0) == pytest.approx(MODEL.colocated_s(cost))
    assert MODEL.ahead_s(cost + 0.01, 0.0) < MODEL.colocated_s(cost + 0.01)
    later = MODEL.least_cost(0.005)
    assert later is not None
    assert later > cost, "a link costs"
    equal = dataclasses.replace(MODEL, verify_shared_s=MODEL.verify_s, tokens_per_ahead_round=3.0)
    assert equal.least_cost(0.0) == 0.0, "the second core was of no use to the verifier"
    assert dataclasses.replace(MODEL, hit_rate=0.0, num_miss_forwards=4.0).least_cost(0.0) is None


@pytest.mark.parametrize(
    ("shared_s", "says"), [(1.7, "where a draft forward costs more than"), (1.0, "nowhere up to 21%")]
)
def test_beyond_what_the_model_holds_for_nothing_is_claimed(shared_s: float, says: str):
    lines = verdict({**RUNS, SHARED: [run_of(elapsed_s=shared_s, busy_s=shared_s)]})
    assert "each 6.6% of a verification" in lines[1]
    assert f"both cores {says}" in lines[2]


def test_the_report_has_a_row_per_arm_and_names_the_winner():
    assert [row[0] for row in rows(RUNS)] == list(RUNS)
    assert rows(RUNS)[-1][2:6] == ["2.35", "2.50", "50%", "79%"]
    assert best_ahead(RUNS) == ahead_arm(4)
    assert verdict(RUNS)[0].startswith(f"Here the least time per token has: {ahead_arm(4)}")
    slower = {**RUNS, SHARED: [run_of(elapsed_s=1.0, busy_s=1.0)]}
    assert verdict(slower)[0].startswith(f"Here the least time per token has: {SHARED}")
    machine = Machine(
        cpu="abacus",
        num_cores=2,
        memory_bytes=1 << 34,
        load_average=0.5,
        python="3.11",
        torch="2.13",
        transformers="5.23",
    )
    config = ServiceConfig(speculative_config={"method": "eagle3"})
    options = BenchOptions(
        config=config, workload=Workload(prompts=((1, 2),), max_tokens=8), concurrencies=(1,), repeats=1
    )
    page = to_markdown(RUNS, machine, options)
    assert "abacus, 2 cores" in page
    assert "drafter eagle3" in page
    assert f"| {ahead_arm(4)} | 17.00 ms | 2.35 |" in page
    assert "hit rate           rounds whose draft" in page


def test_arms_that_run_ahead_differ_in_that_alone():
    configs = arm_configs(ServiceConfig(speculative_config={"method": "eagle3"}), (2,), num_cores=2)
    assert list(configs) == [OFF, SHARED, APART, ahead_arm(2)]
    assert not configs[OFF].pools
    assert {name: config.model.threads_per_rank for name, config in configs.items()} == {
        OFF: 2,
        SHARED: 2,
        APART: 1,
        ahead_arm(2): 1,
    }
    for name, number in ((APART, 0), (ahead_arm(2), 2)):
        assert configs[name].speculative == dataclasses.replace(configs[SHARED].speculative, ahead_branches=number)


def test_the_verb_refuses_what_it_cannot_run():
    result = CliRunner().invoke(study, ["ahead", "--outcomes", "some"])
    assert result.exit_code == 2
    assert "numbers with commas" in result.output
    result = CliRunner().invoke(study, ["ahead", "--method", "medusa"])
    assert result.exit_code == 2
    assert "eagle3" in result.output
    result = CliRunner().invoke(study, ["ahead", "--max-tokens", "100000"])
    assert result.exit_code == 2
    assert "max_tokens must be at most" in result.output
