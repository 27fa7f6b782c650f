"""What `outrider simulate` answers: plans by hand, small studies, their tables, plots and options."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from outrider.cluster.cli.main import main
from outrider.cluster.cli.simulate import simulate
from outrider.cluster.simulate.accelerators import ACCELERATORS
from outrider.cluster.simulate.drafting import HIT_RATE
from outrider.cluster.simulate.figures import LatencyBounds, RunFigures
from outrider.cluster.simulate.load import Day, LengthLaw
from outrider.cluster.simulate.plots import plot_day, plot_loads
from outrider.cluster.simulate.report import day_table, fleet_table, plan_table, to_json
from outrider.cluster.simulate.simulation import PoolSample
from outrider.cluster.simulate.studies import DayStudy, Layout, Plan, plan_of, study_fleet, study_loads
from outrider.cluster.simulate.system import LoadLaw, System, adaptive_arm, arms

SYSTEM = System.of(ACCELERATORS["H100"], target_params=8e9, draft_params=1e9)
BIG = System.of(ACCELERATORS["H100"], target_params=70e9, draft_params=1e9)
LOAD = LoadLaw(lengths=LengthLaw(num_prompt_tokens=64, num_output_tokens=32))
PNG = b"\x89PNG\r\n"


def at_capacity(name: str, qps: float, num_accelerators: int) -> RunFigures:
    return RunFigures(
        name=name,
        qps=qps,
        num_requests=100,
        num_accelerators=num_accelerators,
        tokens_per_s=100.0 * qps,
        goodput_tokens_per_s=100.0 * qps,
        good_share=1.0,
        ttft_p50_s=0.1,
        ttft_p99_s=0.2,
        tpot_p50_s=0.01,
        tpot_p99_s=0.02,
        mean_acceptance_length=None,
        draft_length=None,
        num_steps=10,
        num_events=20,
    )


def layouts(pool_qps: float | None, own_qps: float | None, plain_qps: float | None) -> tuple[Layout, ...]:
    """Return 4 verifiers of 4 accelerators, the first with 2 drafters on one each."""
    rows = (("disaggregated", 2, pool_qps), ("co-located", 0, own_qps), ("no drafting", 0, plain_qps))
    return tuple(
        Layout(
            name=name,
            num_verifiers=4,
            num_drafters=num_drafters,
            num_accelerators=16 + num_drafters,
            capacity=None if qps is None else at_capacity(name, qps, 16 + num_drafters),
        )
        for name, num_drafters, qps in rows
    )


def plan(pool_qps: float | None, own_qps: float | None, plain_qps: float | None) -> Plan:
    return plan_of(layouts(pool_qps, own_qps, plain_qps), 100.0, 0.95, BIG)


def test_the_verb_assumes_the_hit_rate_that_was_measured():
    """The number stands in the verb, too, which imports no simulation before it runs."""
    (option,) = (parameter for parameter in simulate.params if parameter.name == "hit_rate")
    assert option.default == HIT_RATE


def test_a_plan_scales_small_fleets_to_the_rate() -> None:
    found = plan(36.0, 16.0, 10.0)
    # 4 x 100 / 36 = 11.1 and 2 x 100 / 36 = 5.6, each rounded up
    assert found.num_verifiers == {"disaggregated": 12, "co-located": 25, "no drafting": 40}
    assert found.num_drafters == {"disaggregated": 6, "co-located": 0, "no drafting": 0}
    assert found.num_accelerators == {"disaggregated": 54, "co-located": 100, "no drafting": 160}


def test_layouts_are_compared_on_the_same_accelerators() -> None:
    found = plan(36.0, 16.0, 10.0)
    # 54 accelerators hold 13 verifiers of 4, two stay idle: 13 x 400 tokens/s over 54
    assert found.tokens_per_s_per_accelerator["disaggregated"] == pytest.approx(3600 / 18)
    assert found.tokens_per_s_per_accelerator["co-located"] == pytest.approx(13 * 400 / 54)


@pytest.mark.parametrize(
    ("rates", "verdict"),
    [
        ((36.0, 16.0, 10.0), "Disaggregation pays: 108% more"),
        ((18.0, 20.0, 10.0), "Disaggregation does not pay: 20% fewer tokens per accelerator than co-located"),
        ((18.0, 16.0, 10.0), "no difference"),
        ((18.0, None, None), "misses the bounds"),
        ((None, None, 10.0), "does not pay: 100% fewer tokens per accelerator than no drafting"),
        ((None, None, None), "No layout keeps the bounds"),
    ],
)
def test_a_plan_says_whether_a_pool_pays(rates: tuple[float | None, ...], verdict: str) -> None:
    assert verdict in plan(*rates).verdict


def test_colocated_drafters_take_memory_and_pools_take_accelerators() -> None:
    plain, own, pool = BIG.plain(2), BIG.colocated(2), BIG.disaggregated(2, 3)
    assert own.verifier.kv_tokens < plain.verifier.kv_tokens == pool.verifier.kv_tokens
    assert (plain.num_accelerators, own.num_accelerators, pool.num_accelerators) == (8, 8, 11)
    assert own.verifier.own_drafter is not None
    assert pool.drafter is not None


def test_every_arm_meets_the_same_requests() -> None:
    fleet = SYSTEM.disaggregated(1, 1)
    rows = study_loads(SYSTEM, fleet, LOAD, [20.0], LatencyBounds(), duration_s=5.0, seed=1)
    assert [row.name for row in rows] == [arm.name for arm in arms(8)]
    assert {row.qps for row in rows} == {rows[0].qps}
    speeds = {row.name: row.tpot_p50_s for row in rows}
    assert speeds["adaptive"] < 0.8 * speeds["off"]


def test_fixed_arms_are_not_longer_than_drafts_may_be() -> None:
    assert [arm.name for arm in arms(4)] == ["off", "K = 2", "K = 4", "adaptive", "oracle"]


def test_a_fleet_says_how_fast_it_was_simulated() -> None:
    times = iter([10.0, 14.0])
    workload = LOAD.steady(50.0, 40, np.random.default_rng(0))
    found = study_fleet(
        SYSTEM.disaggregated(1, 1), workload, adaptive_arm(8), LatencyBounds(), seed=0, clock=lambda: next(times)
    )
    assert found.requests_per_s == 10.0
    assert found.events_per_s == found.figures.num_events / 4.0
    assert found.figures.num_events > 80  # an arrival and an end of each


def text_of(renderable: object) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_plans_days_and_loads_are_shown(tmp_path: Path) -> None:
    found = plan(36.0, None, 10.0)
    assert "54" in text_of(plan_table(found))
    samples = tuple(
        PoolSample(float(at), number, 1, 5, 0.5, "fits", "steady") for at, number in enumerate((1, 2, 3, 2, 1, 2))
    )
    row = at_capacity("adaptive", 10.0, 4)
    day = DayStudy(figures=row, day=Day(mean_qps=1.0, length_s=6.0), samples=samples)
    assert "verifiers 1 to 3" in text_of(day_table(day))
    assert "2 and 0 turns" in text_of(day_table(day))
    plot_day(day, tmp_path / "day.png")
    plot_loads([row, at_capacity("off", 10.0, 4)], tmp_path / "load.png")
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in ("day.png", "load.png"))
    for value in (found, day, [row]):
        assert json.loads(json.dumps(to_json(value)))["format_version"] == 1


def test_the_verb_simulates_a_fleet(tmp_path: Path) -> None:
    json_file = tmp_path / "fleet.json"
    arguments = ["simulate", "--study", "fleet", "--num-requests", "50", "--qps", "20", "--json", str(json_file)]
    result = CliRunner().invoke(main, [*arguments, "--num-verifiers", "1", "--num-output-tokens", "16"])
    assert result.exit_code == 0, result.output
    assert "50 requests" in result.output
    assert "simulate: 100%" in result.output  # a log gets lines where a terminal has a bar
    assert json.loads(json_file.read_text())["figures"]["num_requests"] == 50


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--target-params", "5e12"], "num_params"),
        (["--target-params", "70e9", "-tp", "1"], "tensor_parallel_size"),
        (["--acceptance", "1.5"], "acceptance"),
        (["--hit-rate", "2"], "hit_rate"),
        (["--slo-tpot-ms", "0"], "tpot_s"),
        (["--step-fit", "1,2"], "--step-fit"),
        (["--num-cells", "3", "--num-verifiers", "2"], "num_cells"),
        (["--report-interval-s", "5"], "report_interval_s"),
    ],
)
def test_a_bad_option_is_named(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, ["simulate", "--study", "fleet", "--num-requests", "5", *options])
    assert result.exit_code == 2
    assert complaint in result.output


def test_a_fit_replaces_the_roofline() -> None:
    options = ["--study", "fleet", "--num-requests", "20", "--num-verifiers", "1", "--num-drafters", "0"]
    outputs = [
        CliRunner().invoke(main, ["simulate", *options, *fit]).output
        for fit in ([], ["--step-fit", "0.2,0,0", "--draft-fit", "0.1,0,0"])
    ]
    assert outputs[0] != outputs[1]
    assert "202." in outputs[1]  # a base of 200 ms, and 2.5 ms of overhead and all-reduces


def test_tables_of_fleets_have_their_figures() -> None:
    workload = LOAD.steady(50.0, 20, np.random.default_rng(0))
    found = study_fleet(SYSTEM.plain(1), workload, adaptive_arm(8), LatencyBounds(), seed=0)
    assert "events/s" in text_of(fleet_table(found))
