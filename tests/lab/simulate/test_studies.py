"""What `outrider simulate` answers: plans by hand, small studies, their tables, plots and options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from outrider.cluster.cli.main import main
from outrider.lab.cli.simulate import simulate
from outrider.lab.simulate import studies
from outrider.lab.simulate.accelerators import ACCELERATORS, StepTiming
from outrider.lab.simulate.drafting import HIT_RATE
from outrider.lab.simulate.figures import LatencyBounds, RunFigures
from outrider.lab.simulate.load import Day, LengthLaw
from outrider.lab.simulate.money import PRICES_PER_HOUR, Bill
from outrider.lab.simulate.plots import plot_day, plot_loads
from outrider.lab.simulate.report import day_table, plan_table, to_json
from outrider.lab.simulate.simulation import PoolSample
from outrider.lab.simulate.studies import (
    DayStudy,
    Layout,
    Plan,
    Purchase,
    plan_of,
    study_fleet,
    study_loads,
    with_pools,
)
from outrider.lab.simulate.system import LoadLaw, System, adaptive_arm, arms

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
    """Return 4 verifiers of 4 accelerators, the first with 2 drafters on one each, which cost a quarter."""
    rows = (("disaggregated, drafters on L4", 2, pool_qps), ("co-located", 0, own_qps), ("no drafting", 0, plain_qps))
    return tuple(
        Layout(
            name=name,
            num_verifiers=4,
            num_drafters=num_drafters,
            bill=Bill(num_verifier_devices=16, num_drafter_devices=num_drafters, verifier_price=2.0, drafter_price=0.5),
            capacity=None if qps is None else at_capacity(name, qps, 16 + num_drafters),
        )
        for name, num_drafters, qps in rows
    )


def plan(pool_qps: float | None, own_qps: float | None, plain_qps: float | None) -> Plan:
    return plan_of(layouts(pool_qps, own_qps, plain_qps), 100.0, 0.95)


def test_the_verb_assumes_what_was_measured_and_knows_every_accelerator() -> None:
    """Both stand in the verb, too, which imports no simulation before it runs."""
    options = {parameter.name: parameter for parameter in simulate.params}
    assert options["hit_rate"].default == HIT_RATE
    choice = options["draft_accelerator"].type
    assert isinstance(choice, click.Choice)
    assert list(choice.choices) == list(ACCELERATORS)


def test_a_plan_scales_small_fleets_to_the_rate() -> None:
    pool, own, plain = plan(36.0, 16.0, 10.0).purchases.values()
    # 4 x 100 / 36 = 11.1 and 2 x 100 / 36 = 5.6, each rounded up
    assert pool == Purchase(num_verifiers=12, num_drafters=6, num_accelerators=54, price_per_hour=48 * 2.0 + 6 * 0.5)
    assert own == Purchase(num_verifiers=25, num_drafters=0, num_accelerators=100, price_per_hour=200.0)
    assert plain == Purchase(num_verifiers=40, num_drafters=0, num_accelerators=160, price_per_hour=320.0)


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ((36.0, 16.0, 10.0), "Disaggregation pays (disaggregated, drafters on L4): 118% more"),  # 3600 / 33, 1600 / 32
        ((18.0, 20.0, 10.0), "does not pay (disaggregated, drafters on L4): 13% fewer tokens for the price than co-l"),
        ((16.5, 16.0, 10.0), "no difference"),
        ((18.0, None, None), "misses the bounds"),
        ((None, None, 10.0), "100% fewer tokens for the price than no drafting"),
        ((None, None, None), "No layout keeps the bounds"),
    ],
)
def test_a_plan_says_whether_a_pool_pays(rates: tuple[float | None, ...], found: str) -> None:
    assert found in plan(*rates).verdict


def test_drafters_have_an_accelerator_of_their_own() -> None:
    cheap = replace(BIG, draft_accelerator=ACCELERATORS["L4"])
    shape = cheap.disaggregated(4, 2).drafter
    assert shape is not None
    assert shape.timing == StepTiming.roofline(ACCELERATORS["L4"], BIG.draft)
    assert cheap.bill(cheap.disaggregated(4, 2)) == Bill(
        num_verifier_devices=16,
        num_drafter_devices=2,
        verifier_price=PRICES_PER_HOUR["H100"],
        drafter_price=PRICES_PER_HOUR["L4"],
    )
    assert list(with_pools(cheap)) == ["disaggregated, drafters on H100", "disaggregated, drafters on L4"]
    assert list(with_pools(BIG)) == ["disaggregated, drafters on H100"]


def test_a_fit_of_the_drafter_holds_where_it_was_made() -> None:
    fit = StepTiming(compute_token_s=0.0, base_s=0.1, context_token_s=0.0)
    cheap = replace(BIG, draft_accelerator=ACCELERATORS["L4"], draft_fit=fit)
    shapes = [on.disaggregated(1, 1).drafter for on in with_pools(cheap).values()]
    assert [shape is not None and shape.timing == fit for shape in shapes] == [False, True]
    assert cheap.colocated(1).verifier.own_drafter != fit
    assert replace(BIG, draft_fit=fit).colocated(1).verifier.own_drafter == fit


def test_every_arm_meets_the_same_requests() -> None:
    fleet = SYSTEM.disaggregated(1, 1)
    rows = study_loads(SYSTEM, fleet, LOAD, [20.0], LatencyBounds(), duration_s=5.0, seed=1)
    assert [row.name for row in rows] == [arm.name for arm in arms(8)]
    assert {row.qps for row in rows} == {rows[0].qps}
    speeds = {row.name: row.tpot_p50_s for row in rows}
    assert speeds["adaptive"] < 0.8 * speeds["off"]


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


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--target-params", "5e12"], "num_params"),
        (["--target-params", "70e9", "-tp", "1"], "tensor_parallel_size"),
        (["--acceptance", "1.5"], "acceptance"),
        (["--hit-rate", "2"], "hit_rate"),
        (["--slo-tpot-ms", "0"], "tpot_s"),
        (["--step-fit", "1,2"], "--step-fit"),
        (["--price-per-hour", "H100=free"], "price_per_hour"),
        (["--draft-accelerator", "L4", "--draft-params", "20e9"], "draft_tensor_parallel_size"),
        (["--num-cells", "3", "--num-verifiers", "2"], "num_cells"),
        (["--report-interval-s", "5"], "report_interval_s"),
    ],
)
def test_a_bad_option_is_named(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(main, ["simulate", "--study", "fleet", "--num-requests", "5", *options])
    assert result.exit_code == 2
    assert complaint in result.output


def test_the_verb_plans_with_drafters_on_cheaper_accelerators(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (
        ("MIN_REQUESTS", 20),
        ("NUM_BISECTIONS", 1),
        ("DRAFTERS_PER_CELL", (1,)),
        ("CELL_VERIFIERS", 1),
    ):
        monkeypatch.setattr(studies, name, value)
    json_file = tmp_path / "plan.json"
    arguments = ["simulate", "--target-params", "8e9", "--draft-accelerator", "L4", "--price-per-hour", "L4=0.5"]
    arguments += [
        "--duration-s",
        "3",
        "--num-prompt-tokens",
        "2000",
        "--num-output-tokens",
        "16",
        "--json",
        str(json_file),
    ]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    for text in ("drafters on H100", "drafters on L4", "co-located", "no drafting", "per verifier device", "price/h"):
        assert text in result.output
    plan = json.loads(json_file.read_text())
    assert plan["layouts"][1]["bill"]["drafter_price"] == 0.5
    assert "Disaggregation" in plan["verdict"]
