"""The counters of a load report that our own engine and vLLM share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.step_stats import StepStats
from outrider.verifier_service.messages.counts import EngineCounters, Histogram, VersionCounts
from outrider.verifier_service.messages.engine import DrafterCircuit


def counters_of(stats: StepStats, *others: object, uncounted: Collection[str] = ()) -> EngineCounters:
    """Return the counters of steps and of `others`, each under its name; `uncounted` ones stay 0.

    Raises `AttributeError` naming a counter that is nowhere.
    """
    names = [each.name for each in fields(EngineCounters) if each.name not in uncounted]
    counted = {name: _state(getattr(_source(name, (stats, *others)), name)) for name in names}
    counted["by_version"] = tuple(
        VersionCounts(
            weight_version=version,
            num_draft_tokens=counts.num_draft_tokens,
            num_accepted_tokens=counts.num_accepted_tokens,
        )
        for version, counts in stats.by_version.items()
    )
    return EngineCounters(**counted)


def _source(name: str, sources: Sequence[object]) -> object:
    """Return who counts a name; the last one where nobody does."""
    return next((source for source in sources if hasattr(source, name)), sources[-1])


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
