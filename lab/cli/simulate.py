"""`outrider simulate`: options in, tables and plots out. Nothing heavy is imported before the verb runs."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import OnWork, console_of, show_work
from outrider.lab.report import files, write

if TYPE_CHECKING:
    from outrider.lab.simulate.figures import LatencyBounds
    from outrider.lab.simulate.system import LoadLaw, System

PLAIN_WIDTH = 170
SELDOM = 100  # times as many new objects until the garbage collector looks
NAME = "simulate"  # of the work, as it is shown
PLAN, BREAK_EVEN, FLEET, LOAD, DAY, KV, APART = "plan", "break-even", "fleet", "load", "day", "kv", "apart"
STAGES = "stages"
WITHOUT_PLOT = {PLAN: "a plan", BREAK_EVEN: "a break-even", FLEET: "one fleet", KV: "kv", APART: "apart"}
# The names of `ACCELERATORS`: a test compares them, since that module is imported when the verb runs.
BIG, SMALL = ("H100", "H200", "B200"), ("L4", "A10G", "L40S", "CPU")

_OPTIONS = (
    click.option(
        "--study",
        type=click.Choice([PLAN, BREAK_EVEN, FLEET, LOAD, DAY, KV, APART, STAGES]),
        default=PLAN,
        show_default=True,
        help="plan: how many of each for --qps, and at what price. break-even: from which price, acceptance and link "
        "on drafters of their own pay, by the arithmetic of a round. fleet: one fleet. load: every way to set draft "
        "lengths at --loads. day: pools that scale over a day of --qps on average. kv: the KV that drafts save. "
        "apart: one verifier that prefills and one that decodes beside two that do both. stages: where drafts pay on "
        "pipeline stages and with experts over devices, by arithmetic.",
    ),
    click.option("--accelerator", type=click.Choice(BIG), default="H100", show_default=True),
    click.option(
        "--draft-accelerator", type=click.Choice((*BIG, *SMALL)), help="Of drafters. Default: as --accelerator."
    ),
    click.option(
        "--price-per-hour",
        multiple=True,
        metavar="NAME=PRICE",
        help="Of one accelerator, such as H100=2.5; may be repeated. Defaults: docs/results/money.md.",
    ),
    click.option("--target-params", type=float, default=70e9, show_default=True, help="Parameters of the target."),
    click.option("--draft-params", type=float, default=1e9, show_default=True, help="Parameters of the draft model."),
    click.option("--tensor-parallel-size", "-tp", type=click.IntRange(min=1), help="Default: the least that holds it."),
    click.option("--draft-tensor-parallel-size", type=click.IntRange(min=1), default=1, show_default=True),
    click.option(
        "--step-fit",
        metavar="S,S,S",
        help="Seconds of a target step in place of the roofline: base, per token, per position of context. "
        "The accelerator's compute bound holds all the same.",
    ),
    click.option("--draft-fit", metavar="S,S,S", help="The same of a drafter's step."),
    click.option("--qps", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True),
    click.option("--slo-ttft-ms", type=float, default=2000.0, show_default=True, help="Time to first token at most."),
    click.option("--slo-tpot-ms", type=float, default=50.0, show_default=True, help="Mean time per output token."),
    click.option(
        "--num-verifiers",
        type=click.IntRange(min=1),
        default=4,
        show_default=True,
        help="Of fleet, load and kv; of a day the most.",
    ),
    click.option(
        "--num-drafters",
        type=click.IntRange(min=0),
        default=1,
        show_default=True,
        help="Of fleet, load and kv; of a day the most.",
    ),
    click.option("--num-cells", type=click.IntRange(min=1), default=1, show_default=True, help="Routers of a fleet."),
    click.option("--num-requests", type=click.IntRange(min=1), default=10_000, show_default=True, help="Of a fleet."),
    click.option("--report-interval-s", type=float, default=0.25, show_default=True, help="Of every replica."),
    click.option(
        "--loads", default="10,20,40,60,80,100", show_default=True, help="Requests/s with commas between them."
    ),
    click.option("--duration-s", type=float, default=60.0, show_default=True, help="Of arrivals at each load."),
    click.option("--day-s", type=float, default=3600.0, show_default=True, help="Length of the day."),
    click.option("--num-prompt-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="On average."),
    click.option("--num-output-tokens", type=click.IntRange(min=1), default=256, show_default=True, help="On average."),
    click.option("--acceptance", type=float, default=0.7, show_default=True, help="Of a draft position, on average."),
    click.option(
        "--traces",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="JSONL of recorded requests in place of the laws of lengths and acceptance.",
    ),
    click.option("--recorded", default="eagle", show_default=True, help="The drafter in the traces."),
    click.option("--num-speculative-tokens", type=click.IntRange(min=1), default=8, show_default=True),
    click.option("--link-ms", type=float, default=0.5, show_default=True, help="Round trip to a drafter."),
    click.option(
        "--hit-rate",
        type=float,
        default=0.55,  # `HIT_RATE`: a test compares them, since that module is imported when the verb runs
        show_default=True,
        help="Of running ahead, as measured in docs/results/index.md; 0: drafters do not.",
    ),
    click.option("--seed", type=int, default=0, show_default=True),
    files("plot", "json"),
)


def _options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(context_settings=CONTEXT_SETTINGS)
@_options
def simulate(study: str, plot_file: Path | None, json_file: Path | None, **options: Any) -> None:
    """Simulate a fleet in virtual time: the service's own router, price and autoscaler around fake engines.

    Step times are rooflines of published figures, nothing measured: compare layouts with them, do not promise them.
    """
    from outrider.cluster.common.extras import require_extra

    try:
        if plot_file is not None:
            require_extra("plots", "--plot")
            if study in WITHOUT_PLOT:
                raise ValueError(f"--plot: {WITHOUT_PLOT[study]} has none")
        total = {FLEET: options["num_requests"], DAY: options["qps"] * options["day_s"]}.get(study)
        is_arithmetic = study in (BREAK_EVEN, STAGES)
        progress = contextlib.nullcontext(lambda done, word: None) if is_arithmetic else show_work(NAME, total)
        with _seldom_collected(), progress as on_work:
            given = SimpleNamespace(
                **options,
                system=_system(**options),
                load=_load(**options),
                bounds=_bounds(**options),
                on_run=_counting(on_work),
                on_progress=lambda done: on_work(done, f"{done} requests"),
            )
            table, result = _STUDIES[study](given, plot_file)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    console_of(PLAIN_WIDTH).print(table)
    from outrider.lab.simulate.report import to_json

    write(json_file, lambda: to_json(result))


def _plan(given: SimpleNamespace, _: Path | None) -> tuple[Any, Any]:
    from outrider.lab.simulate.report import plan_table
    from outrider.lab.simulate.studies import make_plan

    several = {"duration_s": given.duration_s, "seed": given.seed, "on_run": given.on_run}
    plan = make_plan(given.system, given.load, given.qps, given.bounds, **several)
    return plan_table(plan), plan


def _break_even(given: SimpleNamespace, _: Path | None) -> tuple[Any, Any]:
    from outrider.lab.simulate.break_even import study_break_even
    from outrider.lab.simulate.report import break_even_table

    found = study_break_even(given.system, given.load, given.bounds)
    return break_even_table(found), found


def _fleet(given: SimpleNamespace, _: Path | None) -> tuple[Any, Any]:
    from dataclasses import replace

    import numpy as np

    from outrider.lab.simulate.report import fleet_table
    from outrider.lab.simulate.studies import study_fleet
    from outrider.lab.simulate.system import adaptive_arm

    arm = adaptive_arm(given.system.num_speculative_tokens)
    arm = replace(arm, options=replace(arm.options, report_interval_s=given.report_interval_s))
    fleet = given.system.disaggregated(given.num_verifiers, given.num_drafters, given.num_cells)
    workload = given.load.steady(given.qps, given.num_requests, np.random.default_rng(given.seed))
    found = study_fleet(fleet, workload, arm, given.bounds, seed=given.seed, on_progress=given.on_progress)
    return fleet_table(found), found


def _loads(given: SimpleNamespace, plot_file: Path | None) -> tuple[Any, Any]:
    from outrider.lab.simulate.report import runs_table
    from outrider.lab.simulate.studies import study_loads

    fleet = given.system.disaggregated(given.num_verifiers, given.num_drafters)
    several = {"duration_s": given.duration_s, "seed": given.seed, "on_run": given.on_run}
    rates = _numbers("--loads", given.loads)
    rows = study_loads(given.system, fleet, given.load, rates, given.bounds, **several)
    if plot_file is not None:
        from outrider.lab.simulate.plots import plot_loads

        plot_loads(rows, plot_file)
    return runs_table(rows, f"{given.num_verifiers} verifiers, {given.num_drafters} drafters"), rows


def _kv(given: SimpleNamespace, _: Path | None) -> tuple[Any, Any]:
    from outrider.lab.simulate.kv import study_kv
    from outrider.lab.simulate.report import kv_table

    fleet = given.system.disaggregated(given.num_verifiers, given.num_drafters)
    several = {"duration_s": given.duration_s, "seed": given.seed, "on_run": given.on_run}
    found = study_kv(given.system, fleet, given.load, _numbers("--loads", given.loads), **several)
    return kv_table(found), found


def _day(given: SimpleNamespace, plot_file: Path | None) -> tuple[Any, Any]:
    from outrider.cluster.scaling.autoscaling import PoolsPolicy, ReplicaRange
    from outrider.lab.simulate.load import Day
    from outrider.lab.simulate.report import day_table
    from outrider.lab.simulate.scaling import ScalingOptions
    from outrider.lab.simulate.studies import study_day
    from outrider.lab.simulate.system import adaptive_arm

    verifiers, drafters = ReplicaRange(1, given.num_verifiers), ReplicaRange(0, given.num_drafters)
    found = study_day(
        given.system.disaggregated(1, min(1, given.num_drafters)),
        given.load,
        Day(mean_qps=given.qps, length_s=given.day_s),
        adaptive_arm(given.system.num_speculative_tokens),
        ScalingOptions(policy=PoolsPolicy(verifiers=verifiers, drafters=drafters)),
        given.bounds,
        seed=given.seed,
        on_progress=given.on_progress,
    )
    if plot_file is not None:
        from outrider.lab.simulate.plots import plot_day

        plot_day(found, plot_file)
    return day_table(found), found


def _apart(given: SimpleNamespace, _: Path | None) -> tuple[Any, Any]:
    from outrider.lab.simulate.apart import study_apart
    from outrider.lab.simulate.report import apart_table

    several = {"duration_s": given.duration_s, "seed": given.seed, "on_run": given.on_run}
    rows = study_apart(given.system, given.load, **several)
    return apart_table(rows), rows


def _stages(given: SimpleNamespace, plot_file: Path | None) -> tuple[Any, Any]:
    from outrider.lab.simulate.report import stages_table
    from outrider.lab.simulate.stages import study_stages

    found = study_stages(given.system, given.load.lengths)
    if plot_file is not None:
        from outrider.lab.simulate.plots import plot_stages

        plot_stages(found, plot_file)
    return stages_table(found), found


_STUDIES: dict[str, Callable[[SimpleNamespace, Path | None], tuple[Any, Any]]] = {
    PLAN: _plan,
    BREAK_EVEN: _break_even,
    FLEET: _fleet,
    LOAD: _loads,
    DAY: _day,
    KV: _kv,
    APART: _apart,
    STAGES: _stages,
}


def _system(
    *,
    accelerator: str,
    draft_accelerator: str | None,
    price_per_hour: Sequence[str],
    target_params: float,
    draft_params: float,
    tensor_parallel_size: int | None,
    draft_tensor_parallel_size: int,
    step_fit: str | None,
    draft_fit: str | None,
    num_speculative_tokens: int,
    link_ms: float,
    hit_rate: float,
    **_: Any,
) -> System:
    from dataclasses import replace

    from outrider.lab.simulate.accelerators import ACCELERATORS, StepTiming
    from outrider.lab.simulate.money import prices_with
    from outrider.lab.simulate.system import System

    system = replace(
        System.of(
            ACCELERATORS[accelerator],
            target_params=target_params,
            draft_params=draft_params,
            tensor_parallel_size=tensor_parallel_size,
        ),
        draft_tensor_parallel_size=draft_tensor_parallel_size,
        num_speculative_tokens=num_speculative_tokens,
        link_s=link_ms / 1e3,
        hit_rate=hit_rate,
        draft_accelerator=None if draft_accelerator is None else ACCELERATORS[draft_accelerator],
        prices_per_hour=prices_with(price_per_hour),
    )

    def fit(option: str, text: str | None, timing: StepTiming) -> StepTiming | None:
        if text is None:
            return None
        numbers = _numbers(option, text)
        if len(numbers) != 3:
            raise ValueError(f"{option}: expected three numbers")
        return replace(timing, base_s=numbers[0], token_s=numbers[1], context_token_s=numbers[2])

    roofline = StepTiming.roofline(system.accelerator, system.target, system.tensor_parallel_size)
    draft_roofline = StepTiming.roofline(system.drafters_on, system.draft, draft_tensor_parallel_size)
    return replace(
        system,
        step_fit=fit("--step-fit", step_fit, roofline),
        draft_fit=fit("--draft-fit", draft_fit, draft_roofline),
    )


def _load(
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    acceptance: float,
    traces: Path | None,
    recorded: str,
    **_: Any,
) -> LoadLaw:
    from outrider.lab.simulate.load import LengthLaw
    from outrider.lab.simulate.system import LoadLaw

    recorded_requests: tuple[Any, ...] = ()
    if traces is not None:
        from outrider.lab.replay.traces import read_traces

        recorded_requests = tuple(read_traces(traces))
    return LoadLaw(
        lengths=LengthLaw(num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens),
        acceptance=acceptance,
        traces=recorded_requests,
        recorded=recorded,
    )


def _bounds(*, slo_ttft_ms: float, slo_tpot_ms: float, **_: Any) -> LatencyBounds:
    from outrider.lab.simulate.figures import LatencyBounds

    return LatencyBounds(ttft_s=slo_ttft_ms / 1e3, tpot_s=slo_tpot_ms / 1e3)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option}: expected numbers with commas between them") from error


def _counting(on_work: OnWork) -> Callable[[], None]:
    numbers = itertools.count(1)

    def on_run() -> None:
        number = next(numbers)
        on_work(number, f"{number} simulations")

    return on_run


@contextlib.contextmanager
def _seldom_collected() -> Iterator[None]:
    """Look for garbage in cycles a hundred times less often: a simulation makes none, and looking takes its time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(SELDOM * thresholds[0], *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
