"""The counters of a load report that our own engine and vLLM share."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.step_stats import StepStats
from outrider.verifier_service.messages.counts import EngineCounters, Histogram, VersionCounts
from outrider.verifier_service.messages.engine import DrafterCircuit


def counters_of(stats: StepStats, *others: object) -> EngineCounters:
    """Return the counters of steps and of `others`, each under its name; those that nobody counts stay 0."""
    counted = {
        each.name: _state(getattr(source, each.name))
        for each in fields(EngineCounters)
        for source in (stats, *others)
        if hasattr(source, each.name)
    }
    counted["by_version"] = tuple(
        VersionCounts(
            weight_version=version,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
        )
        for version, counts in stats.by_version.items()
    )
    return EngineCounters(**counted)


def _state(count: Any) -> Any:
    """Return what a report carries of a count, which goes on."""
    match count:
        case Histogram():
            return count.counts()
        case dict():
            return dict(count)
    return count


def circuits_of(drafting: DraftCoordinator, now_s: float) -> tuple[DrafterCircuit, ...]:
    """Return the state of the circuit breaker in front of every drafter that is up."""
    states = drafting.circuits(now_s)
    return tuple(DrafterCircuit(drafter_id=drafter_id, state=state.value) for drafter_id, state in states.items())
