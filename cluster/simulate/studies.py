"""The questions that `outrider simulate` answers: a fleet as it is, loads side by side, a day, and how many to buy."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.cluster.simulate.figures import LatencyBounds, RunFigures
from outrider.cluster.simulate.load import Day, Workload, day_arrivals
from outrider.cluster.simulate.scaling import ScalingOptions
from outrider.cluster.simulate.simulation import FleetShape, PoolSample, Simulation
from outrider.cluster.simulate.system import Arm, LoadLaw, System, adaptive_arm, arms, off_arm

OnProgress = Callable[[int], None]

FIRST_QPS = 1.0  # per accelerator, of the search for a capacity
NUM_BISECTIONS = 5
MIN_REQUESTS = 200
CELL_VERIFIERS = 4  # of the fleets that plans are made from
DRAFTERS_PER_CELL = (1, 2, 4)
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
    num_accelerators: int
    capacity: RunFigures | None  # at the highest rate that keeps the bounds; None: none does

    @property
    def capacity_qps(self) -> float:
        return 0.0 if self.capacity is None else self.capacity.qps


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many of each are needed, and what else the same accelerators would give."""

    qps: float
    share: float
    layouts: tuple[Layout, ...]  # one of a kind, the best of it
    num_verifiers: dict[str, int]  # by layout; without those that never keep the bounds
    num_drafters: dict[str, int]
    num_accelerators: dict[str, int]
    tokens_per_s_per_accelerator: dict[str, float]  # on the accelerators of the disaggregated layout
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

    def capacity(name: str, fleet: FleetShape, arm: Arm) -> Layout:
        found = _capacity(fleet, load, arm, bounds, share=share, duration_s=duration_s, seed=seed, on_run=on_run)
        return Layout(
            name=name,
            num_verifiers=fleet.num_verifiers,
            num_drafters=fleet.num_drafters,
            num_accelerators=fleet.num_accelerators,
            capacity=found,
        )

    adaptive = adaptive_arm(system.num_speculative_tokens)
    pools = [
        capacity("disaggregated", system.disaggregated(CELL_VERIFIERS, num_drafters), adaptive)
        for num_drafters in DRAFTERS_PER_CELL
    ]
    layouts = (
        max(pools, key=lambda layout: layout.capacity_qps / layout.num_accelerators),
        capacity("co-located", system.colocated(CELL_VERIFIERS), adaptive),
        capacity("no drafting", system.plain(CELL_VERIFIERS), off_arm()),
    )
    return plan_of(layouts, qps, share, system)


def plan_of(layouts: tuple[Layout, ...], qps: float, share: float, system: System) -> Plan:
    """Scale the layouts to a rate; the first is the one that the others are compared with."""
    reachable = [layout for layout in layouts if layout.capacity is not None]
    verifiers = {item.name: math.ceil(item.num_verifiers * qps / item.capacity_qps) for item in reachable}
    drafters = {item.name: math.ceil(item.num_drafters * qps / item.capacity_qps) for item in reachable}
    accelerators = {
        name: verifiers[name] * system.tensor_parallel_size + drafters[name] * system.draft_tensor_parallel_size
        for name in verifiers
    }
    budget = accelerators.get(layouts[0].name) or max(accelerators.values(), default=1)
    speeds = {layout.name: _speed_on(layout, budget, system) for layout in layouts}
    return Plan(
        qps=qps,
        share=share,
        layouts=layouts,
        num_verifiers=verifiers,
        num_drafters=drafters,
        num_accelerators=accelerators,
        tokens_per_s_per_accelerator=speeds,
        verdict=_verdict(speeds, layouts[0].name),
    )


def _speed_on(layout: Layout, budget: int, system: System) -> float:
    """Return tokens per second and accelerator at the bounds, those of `budget` that stay idle included."""
    if layout.capacity is None:
        return 0.0
    speed = layout.capacity.tokens_per_s
    if layout.num_drafters:
        return speed / layout.num_accelerators
    return speed / layout.num_verifiers * (budget // system.tensor_parallel_size) / budget


def _verdict(speeds: dict[str, float], disaggregated: str) -> str:
    """Say whether a pool of drafters pays."""
    name, best = max(((name, speed) for name, speed in speeds.items() if name != disaggregated), key=lambda at: at[1])
    own = speeds[disaggregated]
    if own == 0.0 and best == 0.0:
        return "No layout keeps the bounds at any load: relax them or take faster accelerators."
    if own >= best * PAYS_FROM:
        gain = f"{own / best - 1:.0%} more tokens per accelerator than {name}" if best else f"{name} misses the bounds"
        return f"Disaggregation pays: {gain}."
    if own >= best / PAYS_FROM:
        return f"Disaggregation makes no difference: as many tokens per accelerator as {name}."
    return f"Disaggregation does not pay: {1 - own / best:.0%} fewer tokens per accelerator than {name}."


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
