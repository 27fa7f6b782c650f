"""The questions that `outrider simulate` answers: a fleet as it is, loads side by side, a day, and how many to buy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.lab.simulate.figures import LatencyBounds, RunFigures
from outrider.lab.simulate.load import Day, Workload, day_arrivals
from outrider.lab.simulate.money import Bill, Worth
from outrider.lab.simulate.scaling import ScalingOptions
from outrider.lab.simulate.simulation import FleetShape, PoolSample, Simulation
from outrider.lab.simulate.system import Arm, LoadLaw, System, adaptive_arm, arms, off_arm

OnProgress = Callable[[int], None]

FIRST_QPS = 1.0  # per accelerator, of the search for a capacity
NUM_BISECTIONS = 5
MIN_REQUESTS = 200
CELL_VERIFIERS = 4  # of the fleets that plans are made from
DRAFTERS_PER_CELL = (1, 2, 4)
DISAGGREGATED, CO_LOCATED, NO_DRAFTING = "disaggregated", "co-located", "no drafting"  # what layouts are called
PAYS_FROM = 1.02  # ratios below are within the simulation's noise


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStudy:
    """One fleet under one load, and what simulating it took."""

    figures: RunFigures
    wall_s: float

    @property
    def events_per_s(self) -> float:
        return self.figures.num_events / self.wall_s

    @property
    def requests_per_s(self) -> float:
        return self.figures.num_requests / self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DayStudy:
    figures: RunFigures
    day: Day
    samples: tuple[PoolSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A way to use accelerators, and the most it serves within the bounds."""

    name: str
    num_verifiers: int  # of the fleet that was simulated
    num_drafters: int
    bill: Bill
    capacity: RunFigures | None  # at the highest rate that keeps the bounds; None: none does

    @property
    def capacity_qps(self) -> float:
        return 0.0 if self.capacity is None else self.capacity.qps

    @property
    def worth(self) -> Worth:
        return Worth.of(0.0 if self.capacity is None else self.capacity.tokens_per_s, self.bill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """What a layout takes for a rate, in whole replicas."""

    num_verifiers: int
    num_drafters: int
    num_accelerators: int
    price_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many of each are needed, and what each layout gives for a device and for a price."""

    qps: float
    share: float
    layouts: tuple[Layout, ...]  # the disaggregated ones first, each with the best number of drafters
    purchases: dict[str, Purchase]  # by layout; without those that never keep the bounds
    worths: dict[str, Worth]
    verdict: str


def simulate(fleet: FleetShape, workload: Workload, arm: Arm, seed: int, on_progress: OnProgress) -> Simulation:
    """Run a fleet over a workload to its end."""
    simulation = Simulation(fleet, workload, arm.options, np.random.default_rng(seed))
    simulation.run(on_progress)
    return simulation


def study_fleet(
    fleet: FleetShape,
    workload: Workload,
    arm: Arm,
    bounds: LatencyBounds,
    *,
    seed: int,
    clock: Callable[[], float] = time.perf_counter,
    on_progress: OnProgress = lambda _: None,
) -> FleetStudy:
    """Simulate one fleet and time the simulation."""
    begin_s = clock()
    simulation = simulate(fleet, workload, arm, seed, on_progress)
    wall_s = clock() - begin_s
    return FleetStudy(figures=RunFigures.of(arm.name, simulation, bounds), wall_s=wall_s)


def study_loads(
    system: System,
    fleet: FleetShape,
    load: LoadLaw,
    rates: Sequence[float],
    bounds: LatencyBounds,
    *,
    duration_s: float,
    seed: int,
    on_run: Callable[[], None] = lambda: None,
) -> list[RunFigures]:
    """Run every arm at every rate; the arms of a rate meet the same requests."""
    found = []
    for qps in rates:
        for arm in arms(system.num_speculative_tokens):
            workload = load.steady(qps, _num_requests(qps, duration_s), np.random.default_rng(seed))
            found.append(RunFigures.of(arm.name, simulate(fleet, workload, arm, seed, lambda _: None), bounds))
            on_run()
    return found


def study_day(
    fleet: FleetShape,
    load: LoadLaw,
    day: Day,
    arm: Arm,
    scaling: ScalingOptions,
    bounds: LatencyBounds,
    *,
    seed: int,
    on_progress: OnProgress = lambda _: None,
) -> DayStudy:
    """Run a day with pools that scale."""
    random = np.random.default_rng(seed)
    workload = load.workload(day_arrivals(day, random), random)
    scaled = replace(arm, options=replace(arm.options, scaling=scaling))
    simulation = simulate(fleet, workload, scaled, seed, on_progress)
    return DayStudy(figures=RunFigures.of(arm.name, simulation, bounds), day=day, samples=tuple(simulation.samples))


def make_plan(
    system: System,
    load: LoadLaw,
    qps: float,
    bounds: LatencyBounds,
    *,
    share: float = 0.95,
    duration_s: float = 30.0,
    seed: int = 0,
    on_run: Callable[[], None] = lambda: None,
) -> Plan:
    """Find what a small fleet of each layout serves within the bounds and scale it to the rate asked for.

    Fleets are taken to scale in proportion: requests share nothing but their verifier and its drafters.
    """

    def capacity(name: str, on: System, fleet: FleetShape, arm: Arm) -> Layout:
        found = _capacity(fleet, load, arm, bounds, share=share, duration_s=duration_s, seed=seed, on_run=on_run)
        return Layout(
            name=name,
            num_verifiers=fleet.num_verifiers,
            num_drafters=fleet.num_drafters,
            bill=on.bill(fleet),
            capacity=found,
        )

    adaptive = adaptive_arm(system.num_speculative_tokens)
    pools = [
        max(
            (
                capacity(name, on, on.disaggregated(CELL_VERIFIERS, num_drafters), adaptive)
                for num_drafters in DRAFTERS_PER_CELL
            ),
            key=lambda layout: layout.worth.per_price,
        )
        for name, on in with_pools(system).items()
    ]
    others = (
        capacity(CO_LOCATED, system, system.colocated(CELL_VERIFIERS), adaptive),
        capacity(NO_DRAFTING, system, system.plain(CELL_VERIFIERS), off_arm()),
    )
    return plan_of((*pools, *others), qps, share)


def with_pools(system: System) -> dict[str, System]:
    """Return the system with drafters on the verifiers' accelerators, and on others where they are named."""
    accelerators = dict.fromkeys((system.accelerator, system.drafters_on))
    return {
        f"{DISAGGREGATED}, drafters on {accelerator.name}": replace(
            system,
            draft_accelerator=accelerator,
            draft_fit=system.draft_fit if accelerator == system.drafters_on else None,
        )
        for accelerator in accelerators
    }


def plan_of(layouts: tuple[Layout, ...], qps: float, share: float) -> Plan:
    """Scale the layouts to a rate and compare them by what a price brings."""
    worths = {layout.name: layout.worth for layout in layouts}
    return Plan(
        qps=qps,
        share=share,
        layouts=layouts,
        purchases={layout.name: _purchase(layout, qps) for layout in layouts if layout.capacity is not None},
        worths=worths,
        verdict=verdict({name: worth.per_price for name, worth in worths.items()}),
    )


def _purchase(layout: Layout, qps: float) -> Purchase:
    bill, scale = layout.bill, qps / layout.capacity_qps
    num_verifiers, num_drafters = math.ceil(layout.num_verifiers * scale), math.ceil(layout.num_drafters * scale)
    scaled = replace(
        bill,
        num_verifier_devices=num_verifiers * bill.num_verifier_devices // layout.num_verifiers,
        num_drafter_devices=num_drafters * bill.num_drafter_devices // max(1, layout.num_drafters),
    )
    return Purchase(
        num_verifiers=num_verifiers,
        num_drafters=num_drafters,
        num_accelerators=scaled.num_devices,
        price_per_hour=scaled.price_per_hour,
    )


def verdict(per_price: Mapping[str, float]) -> str:
    """Say whether a pool of drafters pays, by each layout's tokens per price."""

    def best(is_pool: bool) -> tuple[str, float]:
        rows = [(name, at) for name, at in per_price.items() if name.startswith(DISAGGREGATED) == is_pool]
        return max(rows, key=lambda row: row[1])

    (pool, own), (name, other) = best(True), best(False)
    if own == 0.0 and other == 0.0:
        return "No layout keeps the bounds at any load: relax them or take faster accelerators."
    if own >= other * PAYS_FROM:
        gain = f"{own / other - 1:.0%} more tokens for the price than {name}" if other else f"{name} misses the bounds"
        return f"Disaggregation pays ({pool}): {gain}."
    if own >= other / PAYS_FROM:
        return f"Disaggregation makes no difference ({pool}): as many tokens for the price as {name}."
    return f"Disaggregation does not pay ({pool}): {1 - own / other:.0%} fewer tokens for the price than {name}."


def _capacity(
    fleet: FleetShape,
    load: LoadLaw,
    arm: Arm,
    bounds: LatencyBounds,
    *,
    share: float,
    duration_s: float,
    seed: int,
    on_run: Callable[[], None],
) -> RunFigures | None:
    """Return the figures at the highest rate at which `share` of the requests keep the bounds, by bisection."""

    def at(qps: float) -> RunFigures:
        workload = load.steady(qps, _num_requests(qps, duration_s), np.random.default_rng(seed))
        figures = RunFigures.of(arm.name, simulate(fleet, workload, arm, seed, lambda _: None), bounds)
        on_run()
        return figures

    best: RunFigures | None = None
    low, high = 0.0, FIRST_QPS * fleet.num_accelerators
    while (figures := at(high)).good_share >= share:
        low, high, best = high, 2.0 * high, figures
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        figures = at(middle)
        if figures.good_share >= share:
            low, best = middle, figures
        else:
            high = middle
    return best


def _num_requests(qps: float, duration_s: float) -> int:
    return max(MIN_REQUESTS, round(qps * duration_s))
