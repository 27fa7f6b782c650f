"""From which price, acceptance and link on drafters of their own pay: layouts in their steady states, side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outrider.lab.simulate.figures import LatencyBounds
from outrider.lab.simulate.money import Bill, Worth, break_even_ratio
from outrider.lab.simulate.simulation import FleetShape
from outrider.lab.simulate.steady import SteadyState, best_state
from outrider.lab.simulate.studies import CO_LOCATED, DISAGGREGATED, NO_DRAFTING, verdict, with_pools
from outrider.lab.simulate.system import LoadLaw, System

NUM_VERIFIERS = 8  # of the fleets: enough for pools of an eighth of a drafter per verifier
POOL_SIZES = (1, 2, 4, 8, 16)  # drafters for them; the best is taken
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # of a draft position: from prompt lookup to a draft model on code
LINKS_MS = (0.1, 0.5, 2.0, 10.0)  # round trips: one rack, one building, one region, two of them


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyLayout:
    """A layout at its best within the bounds."""

    name: str
    num_drafters: int
    bill: Bill
    state: SteadyState | None  # None: nothing keeps the bounds

    @property
    def tokens_per_s(self) -> float:
        return 0.0 if self.state is None else self.state.tokens_per_s

    @property
    def worth(self) -> Worth:
        return Worth.of(self.tokens_per_s, self.bill)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """What layouts give at the acceptance and link asked for, and where drafters begin to pay elsewhere."""

    num_verifiers: int
    layouts: tuple[SteadyLayout, ...]
    verdict: str
    draft_accelerator: str
    price_ratio: float  # of a drafter's device to a verifier's, as assumed
    ratios: dict[float, dict[float, float | None]]  # by acceptance and link in ms; None: never pays


def study_break_even(system: System, load: LoadLaw, bounds: LatencyBounds) -> BreakEven:
    """Compare layouts in steady states, then find the break-even price of a drafter at every acceptance and link."""
    if load.traces:
        raise ValueError("--traces: a steady state takes acceptance from --acceptance")
    layouts = tuple(
        max(_pools(name, on, load, bounds, load.acceptance), key=lambda layout: layout.worth.per_price)
        for name, on in with_pools(system).items()
    )
    layouts = (*layouts, *_without_pool(system, load, bounds, load.acceptance))
    return BreakEven(
        num_verifiers=NUM_VERIFIERS,
        layouts=layouts,
        verdict=verdict({layout.name: layout.worth.per_price for layout in layouts}),
        draft_accelerator=system.drafters_on.name,
        price_ratio=system.prices_per_hour[system.drafters_on.name] / system.prices_per_hour[system.accelerator.name],
        ratios={
            acceptance: {link_ms: _ratio(system, load, bounds, acceptance, link_ms) for link_ms in LINKS_MS}
            for acceptance in ACCEPTANCES
        },
    )


def _pools(name: str, system: System, load: LoadLaw, bounds: LatencyBounds, acceptance: float) -> list[SteadyLayout]:
    """Return the layout with every size of its pool."""
    fleets = (system.disaggregated(NUM_VERIFIERS, size) for size in POOL_SIZES)
    return [_layout(name, system, fleet, load, bounds, acceptance) for fleet in fleets]


def _without_pool(
    system: System, load: LoadLaw, bounds: LatencyBounds, acceptance: float
) -> tuple[SteadyLayout, SteadyLayout]:
    return (
        _layout(CO_LOCATED, system, system.colocated(NUM_VERIFIERS), load, bounds, acceptance),
        _layout(NO_DRAFTING, system, system.plain(NUM_VERIFIERS), load, bounds, acceptance),
    )


def _layout(
    name: str, system: System, fleet: FleetShape, load: LoadLaw, bounds: LatencyBounds, acceptance: float
) -> SteadyLayout:
    return SteadyLayout(
        name=name,
        num_drafters=fleet.num_drafters,
        bill=system.bill(fleet),
        state=best_state(fleet, load.lengths, acceptance, bounds.tpot_s),
    )


def _ratio(system: System, load: LoadLaw, bounds: LatencyBounds, acceptance: float, link_ms: float) -> float | None:
    """Return up to which price drafters pay with the best pool for it; None: at none."""
    there = replace(system, link_s=link_ms / 1e3)
    rival = max(layout.worth.per_verifier_device for layout in _without_pool(there, load, bounds, acceptance))
    pools = _pools(DISAGGREGATED, there, load, bounds, acceptance)
    if rival == 0.0:
        return math.inf if any(pool.state for pool in pools) else None
    ratio = max(break_even_ratio(pool.tokens_per_s, pool.bill, rival) for pool in pools)
    return ratio if ratio > 0.0 else None
