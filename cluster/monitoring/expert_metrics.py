"""Metrics of mixtures whose experts lie in host memory (`--num-cached-experts`); others have no samples."""

from __future__ import annotations

from collections.abc import Callable

from outrider.cluster.monitoring.fleet_metric import of_verifiers
from outrider.cluster.router.fleet import VerifierState
from outrider.verifier_service.messages.fetch_counts import FetchCounts


def _read(count: Callable[[FetchCounts], int]) -> Callable[[VerifierState], int | None]:
    def read(state: VerifierState) -> int | None:
        fetches = state.report.load.counters.fetches
        return None if fetches is None else count(fetches)

    return read


EXPERTS = (
    of_verifiers(
        "expert_cache_queries",
        "counter",
        "Distinct experts that each layer took in each step, where a mixture's experts lie in host memory",
        _read(lambda fetches: fetches.num_taken),
    ),
    of_verifiers(
        "expert_cache_hits",
        "counter",
        "Those of them that were on the device when the layer's gate asked for them, or on their way",
        _read(lambda fetches: fetches.num_hits),
    ),
    of_verifiers(
        "expert_cache_fetches",
        "counter",
        "Experts copied to the device, those that a layer before foresaw included",
        _read(lambda fetches: fetches.num_fetched),
    ),
)
