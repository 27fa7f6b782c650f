"""`make study NAME=router`: what the global router's decisions cost at a large fleet, without the fleet.

The router's core is called as its actor calls it: verifiers report their requests, whose counters go on between reports
as those of live ones do, drafters report; a gateway hears the news and places new requests. Only their own time counts.

Then, in virtual time: what it costs requests that each of many gateways places by news of a moment ago, and by its own
counts, instead of a router that hears every report and places them all (`Gateways`).
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of
from outrider.cluster.router.fleet import DrafterReport, RouteAsk, VerifierReport
from outrider.cluster.router.router import RouterCore
from outrider.cluster.router.view import FleetView
from outrider.lab.bench.figures import percentile
from outrider.lab.report import Column, files, table_of, write
from outrider.lab.simulate.accelerators import ACCELERATORS
from outrider.lab.simulate.simulation import Simulation
from outrider.lab.simulate.steady import steady_state
from outrider.lab.simulate.system import LoadLaw, System, off_arm
from outrider.verifier_service.messages.drafter_load import DrafterLoad

PLAIN_WIDTH = 120  # columns of text where the output is no terminal
REPORT_INTERVAL_S = 0.25
NUM_WARM_ROUNDS = 16  # until switches have settled
KNEE_TOKENS = 256
STEP_S = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterBenchOptions:
    """The fleet to decide for."""

    num_requests: int = 10_000
    num_verifiers: int = 100
    num_drafters: int = 30
    num_rounds: int = 20  # of reports from everybody
    num_routes: int = 500


@dataclass(frozen=True, slots=True)
class Situation:
    """A state of the fleet: what its verifiers say that a draft token costs."""

    name: str
    price: float


SITUATIONS = (
    Situation("verifiers price, drafts pay", 0.2),
    Situation("verifiers price, none pays", 1.0),
)


@dataclass(slots=True)
class Timings:
    """How long each call took."""

    report_s: list[float] = field(default_factory=list)
    drafter_report_s: list[float] = field(default_factory=list)
    route_s: list[float] = field(default_factory=list)
    affine_route_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One situation's figures."""

    name: str
    on_share: float  # of the requests at the end
    decision_s: float  # per request of a report, mean
    report_p50_s: float
    report_p99_s: float
    drafter_report_p50_s: float
    route_p50_s: float
    affine_route_p50_s: float
    core_share: float  # of a core, with every replica reporting as often as it does and nothing routed


class PlayedVerifier:
    """A verifier that follows the router's plans."""

    def __init__(self, number: int, num_requests: int, situation: Situation, rng: random.Random) -> None:
        self._id = f"verifier-{number}"
        self._situation = situation
        self._rng = rng
        self._request_ids = [f"request-{number}-{index}" for index in range(num_requests)]
        self._plans: dict[str, Any] = {}

    @property
    def num_on(self) -> int:
        return sum(plan.draft_length > 0 for plan in self._plans.values())

    def follow(self, plans: dict[str, Any]) -> None:
        self._plans |= plans

    def report(self, drafter_ids: tuple[str, ...]) -> VerifierReport:
        """Say how its requests are."""
        from outrider.cluster.router.fleet import VerifierReport
        from outrider.verifier_service.messages.engine import DrafterPerformance, EngineLoad, StepTime

        num_requests = len(self._request_ids)
        return VerifierReport(
            verifier_id=self._id,
            endpoint=f"{self._id}:1",
            epoch=1,
            load=EngineLoad(
                num_running=num_requests,
                num_waiting=0,
                num_decoding=num_requests,
                kv_usage=0.5,
                requests=tuple(self._request(request_id) for request_id in self._request_ids),
                drafters=tuple(
                    DrafterPerformance(drafter_id=drafter_id, round_trip_s=self._rng.uniform(0.002, 0.004))
                    for drafter_id in drafter_ids
                ),
                mean_step_s=STEP_S,
                price=self._situation.price,
            ),
            step_times=tuple(
                StepTime(num_tokens=1 << power, seconds=STEP_S * max(1.0, (1 << power) / KNEE_TOKENS))
                for power in range(12)
            ),
            linked_drafters=drafter_ids,
        )

    def _request(self, request_id: str) -> Any:
        from outrider.verifier_service.messages.engine import RequestLoad

        plan = self._plans.get(request_id)
        length = 0 if plan is None else plan.draft_length
        return RequestLoad(
            is_running=True,
            request_id=request_id,
            drafter_id=None if plan is None else plan.drafter_id,
            draft_length=length,
            num_speculative_tokens=None,
        )


def measure(options: RouterBenchOptions, situation: Situation, clock: Callable[[], float]) -> Row:
    """Let a fleet report and time the router; `clock` is the time that counts."""
    rng = random.Random(0)
    core = RouterCore()
    share = [options.num_requests // options.num_verifiers] * options.num_verifiers
    share[0] += options.num_requests - sum(share)
    verifiers = [PlayedVerifier(number, size, situation, rng) for number, size in enumerate(share)]
    drafters = [_drafter_report(number, rng) for number in range(options.num_drafters)]
    drafter_ids = tuple(report.drafter_id for report in drafters)
    timings, now_s = Timings(), 0.0
    for number in range(NUM_WARM_ROUNDS + options.num_rounds):
        if number == NUM_WARM_ROUNDS:
            timings = Timings()
        now_s += REPORT_INTERVAL_S
        for drafter in drafters:
            begin_s = clock()
            core.report_drafter(drafter, now_s)
            timings.drafter_report_s.append(clock() - begin_s)
        for verifier in verifiers:
            report = verifier.report(drafter_ids)
            begin_s = clock()
            directive = core.report_verifier(report, now_s)
            timings.report_s.append(clock() - begin_s)
            verifier.follow(directive.plans)
    _time_routes(core, options.num_routes, now_s, clock, timings)
    num_on = sum(verifier.num_on for verifier in verifiers)
    return _row(situation.name, options, timings, num_on / options.num_requests)


def _time_routes(core: Any, num_routes: int, now_s: float, clock: Callable[[], float], timings: Timings) -> None:

    view = FleetView()
    view.take(core.news(None, now_s))
    for number in range(num_routes):
        for key, times_s in ((None, timings.route_s), (f"prefix-{number % 50}", timings.affine_route_s)):
            ask = RouteAsk(request_id=f"new-{number}-{key}", num_prompt_tokens=100, affinity_key=key)
            begin_s = clock()
            assignment = view.place(ask, now_s)
            view.begin(ask.request_id, assignment.verifier_id, assignment.plan.drafter_id)
            times_s.append(clock() - begin_s)


def _drafter_report(number: int, rng: random.Random) -> DrafterReport:

    return DrafterReport(
        drafter_id=f"drafter-{number}",
        endpoint=f"drafter-{number}:1",
        epoch=1,
        max_draft_length=8,
        load=DrafterLoad(num_sessions=rng.randint(200, 400), queue_depth=rng.randint(0, 8), mean_draft_s=0.003),
    )


def _row(name: str, options: RouterBenchOptions, timings: Timings, on_share: float) -> Row:
    report_s = sum(timings.report_s) / len(timings.report_s)
    drafter_report_s = sum(timings.drafter_report_s) / len(timings.drafter_report_s)
    busy_s = options.num_verifiers * report_s + options.num_drafters * drafter_report_s
    return Row(
        name=name,
        on_share=on_share,
        decision_s=report_s * options.num_verifiers / options.num_requests,
        report_p50_s=_percentile_s(timings.report_s, 0.5),
        report_p99_s=_percentile_s(timings.report_s, 0.99),
        drafter_report_p50_s=_percentile_s(timings.drafter_report_s, 0.5),
        route_p50_s=_percentile_s(timings.route_s, 0.5),
        affine_route_p50_s=_percentile_s(timings.affine_route_s, 0.5),
        core_share=busy_s / REPORT_INTERVAL_S,
    )


def _percentile_s(times_s: list[float], fraction: float) -> float:

    found_s = percentile(times_s, fraction)
    assert found_s is not None, "every call was made at least once"
    return found_s


# --- many gateways ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateways:
    """A fleet at a load, placed for by gateways or by one that knows all.

    Its verifiers run few requests each, so that one too many has to wait.
    """

    num_gateways: int = 50
    num_verifiers: int = 1000
    seconds: float = 9.0  # of virtual time; the first third, in which the fleet fills, does not count
    max_num_seqs: int = 8
    most_waiting: int = 4  # at a verifier
    target_params: float = 70e9  # on H100s


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What requests waited for their first token, and how many were refused, at one load."""

    load: float  # of what the fleet can do
    placed_by: str
    p50_s: float
    p99_s: float
    refused_share: float


LOADS = (0.9, 1.4)


def compare(gateways: Gateways, load: float) -> list[Waits]:
    """Place the same requests by a router that knows all, and by gateways."""
    system = System.of(ACCELERATORS["H100"], target_params=gateways.target_params, draft_params=1e9)
    fleet = dataclasses.replace(system, max_num_seqs=gateways.max_num_seqs).plain(gateways.num_verifiers)
    law = LoadLaw()
    full = steady_state(fleet, law.lengths, law.acceptance, gateways.max_num_seqs, 0)
    qps = load * full.tokens_per_s / law.lengths.num_output_tokens
    rows = []
    for name, num_gateways in (("one that knows all", None), ("gateways", gateways.num_gateways)):
        random = np.random.default_rng(0)
        workload = law.steady(qps, max(1, int(qps * gateways.seconds)), random)
        options = dataclasses.replace(
            off_arm().options, num_gateways=num_gateways, has_affinity=True, most_waiting=gateways.most_waiting
        )
        simulation = Simulation(fleet, workload, options, random)
        simulation.run()
        waits_s = simulation.ledger.ttft_s[workload.arrival_s > gateways.seconds / 3]
        served_s = waits_s[~np.isnan(waits_s)].tolist()
        rows.append(
            Waits(
                load=load,
                placed_by=name,
                p50_s=_percentile_s(served_s, 0.5),
                p99_s=_percentile_s(served_s, 0.99),
                refused_share=float(np.isnan(waits_s).mean()),
            )
        )
    return rows


# --- the verb ---


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--num-requests", type=click.IntRange(min=1), default=10_000, show_default=True, help="Live, in all.")
@click.option("--num-verifiers", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--num-drafters", type=click.IntRange(min=1), default=30, show_default=True)
@click.option(
    "--num-rounds", type=click.IntRange(min=1), default=20, show_default=True, help="Reports of every replica."
)
@click.option("--num-routes", type=click.IntRange(min=1), default=500, show_default=True, help="New requests.")
@click.option(
    "--num-gateways", type=click.IntRange(min=0), default=50, show_default=True, help="0: their waits are left out."
)
@click.option("--simulated-verifiers", type=click.IntRange(min=1), default=1000, show_default=True)
@files("json")
def router(json_file: Path | None, num_gateways: int, simulated_verifiers: int, **options: int) -> None:
    """Time the router's decisions and gateways' choices; simulate what requests wait where many gateways choose."""
    bench_options = RouterBenchOptions(**options)
    progress = track(SITUATIONS, description="reports", console=Console(stderr=True), auto_refresh=False)
    rows = [measure(bench_options, situation, time.thread_time) for situation in progress]
    console_of(PLAIN_WIDTH).print(to_table(bench_options, rows))
    waits: list[Waits] = []
    if num_gateways:
        gateways = Gateways(num_gateways=num_gateways, num_verifiers=simulated_verifiers)
        loads = track(LOADS, description="gateways", console=Console(stderr=True), auto_refresh=False)
        waits = [row for load in loads for row in compare(gateways, load)]
        console_of(PLAIN_WIDTH).print(waits_table(gateways, waits))
    figures = {"options": bench_options, "rows": rows, "waits": waits}
    write(json_file, lambda: {name: _plain(value) for name, value in figures.items()})


def _plain(value: Any) -> Any:
    return [dataclasses.asdict(one) for one in value] if isinstance(value, list) else dataclasses.asdict(value)


def _micros(name: str) -> Callable[[Row], str]:
    return lambda row: f"{getattr(row, name) * 1e6:.1f}"


COLUMNS = (
    Column[Row]("situation", lambda row: row.name),
    Column[Row]("on", lambda row: f"{row.on_share:.0%}"),
    Column[Row]("µs per request", _micros("decision_s")),
    Column[Row]("µs per report p50", _micros("report_p50_s")),
    Column[Row]("p99", _micros("report_p99_s")),
    Column[Row]("drafter's report", _micros("drafter_report_p50_s")),
    Column[Row]("new request", _micros("route_p50_s")),
    Column[Row]("with affinity", _micros("affine_route_p50_s")),
    Column[Row]("of a core", lambda row: f"{row.core_share:.0%}"),
)
WAIT_COLUMNS = (
    Column[Waits]("load", lambda row: f"{row.load:.0%}"),
    Column[Waits]("placed by", lambda row: row.placed_by, is_text=True),
    Column[Waits]("first token after p50", lambda row: f"{1e3 * row.p50_s:.0f} ms"),
    Column[Waits]("p99", lambda row: f"{1e3 * row.p99_s:.0f} ms"),
    Column[Waits]("refused", lambda row: f"{row.refused_share:.2%}"),
)


def to_table(options: RouterBenchOptions, rows: list[Row]) -> Table:
    """Draw the figures for a terminal."""
    title = (
        f"{options.num_requests} requests on {options.num_verifiers} verifiers, {options.num_drafters} drafters; "
        f"reports every {REPORT_INTERVAL_S:g} s"
    )
    return table_of(COLUMNS, rows, title)


def waits_table(gateways: Gateways, rows: list[Waits]) -> Table:
    """Draw the waits for a terminal."""
    title = f"{gateways.num_verifiers} verifiers of {gateways.max_num_seqs} requests, {gateways.num_gateways} gateways"
    return table_of(WAIT_COLUMNS, rows, title)
