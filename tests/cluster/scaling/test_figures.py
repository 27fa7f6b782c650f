"""What replicas export for scaling, and how it adds up."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.cluster.router.planning import off
from outrider.cluster.scaling.autoscaling import DraftersLoad, PoolsLoad, VerifiersLoad
from outrider.cluster.scaling.figures import VerifierFigures, drafter_figures, pools_load
from outrider.verifier_service.messages.counts import HistogramCounts
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import EngineCounters, EngineLoad, RequestLoad
from outrider.verifier_service.messages.request import DisabledReason, SpeculationPlan

FIRST = EngineCounters(
    num_steps=10,
    num_scheduled_tokens=100,
    num_draft_tokens=20,
    round_trip_s=HistogramCounts(bounds=(0.1,), counts=(5, 1), total=1.0),
    lateness_s=HistogramCounts(bounds=(0.1,), counts=(0, 2), total=3.0),
)
SECOND = EngineCounters(
    num_steps=14,
    num_scheduled_tokens=180,
    num_draft_tokens=60,
    round_trip_s=HistogramCounts(bounds=(0.1,), counts=(8, 1), total=1.0),
    lateness_s=HistogramCounts(bounds=(0.1,), counts=(1, 3), total=3.0),
)
NO_DRAFTER = off(DisabledReason.DRAFTER_UNAVAILABLE)


def request(request_id: str, num_speculative_tokens: int | None = None, *, is_running: bool = True) -> RequestLoad:
    return RequestLoad(
        request_id=request_id,
        is_running=is_running,
        drafter_id=None,
        draft_length=0,
        num_speculative_tokens=num_speculative_tokens,
    )


LOAD = EngineLoad(
    num_running=3,
    num_waiting=2,
    num_decoding=2,
    kv_usage=0.25,
    counters=FIRST,
    requests=(request("a"), request("b", 0), request("c", 4), request("waits", is_running=False)),
    price=0.75,
    knee=4.0,
)


def test_a_verifier_exports_its_load_and_counts_since_the_call_before():
    figures = VerifierFigures()
    first = figures.take(LOAD, SpeculationPlan())
    assert (first["num_requests"], first["kv_usage"], first["price"]) == (5.0, 0.25, 0.75)
    assert (first["knee_fill"], first["num_drafts_in_time"], first["num_drafts_late"]) == (2.0, 6.0, 2.0)
    second = figures.take(dataclasses.replace(LOAD, counters=SECOND), SpeculationPlan())
    assert (second["knee_fill"], second["num_drafts_in_time"], second["num_drafts_late"]) == (2.5, 3.0, 2.0)
    third = figures.take(dataclasses.replace(LOAD, counters=SECOND), SpeculationPlan())
    assert (third["knee_fill"], third["num_drafts_in_time"], third["num_drafts_late"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "price"),
    [({}, 0.75), ({"price": 1.7}, 1.0), ({"price": None}, 0.0), ({"num_decoding": 0}, 0.0)],
)
def test_a_price_counts_where_there_is_something_to_decode(changes, price):
    assert VerifierFigures().take(dataclasses.replace(LOAD, **changes), None)["price"] == price


def test_without_a_knee_nothing_fills_it():
    assert VerifierFigures().take(dataclasses.replace(LOAD, knee=None), None)["knee_fill"] == 0.0


@pytest.mark.parametrize(
    ("plan", "num_undrafted"),
    [
        (NO_DRAFTER, 2.0),  # one opted out, one waits
        (off(DisabledReason.DRAFTER_TIMEOUT), 2.0),
        (off(DisabledReason.CONFIG), 0.0),
        (off(DisabledReason.LOAD), 0.0),
        (SpeculationPlan(drafter_id="d", draft_length=4), 0.0),
        (None, 0.0),
    ],
)
def test_requests_lack_a_drafter_where_that_is_all_they_lack(plan, num_undrafted):
    assert VerifierFigures().take(LOAD, plan)["num_undrafted"] == num_undrafted


def test_every_figure_is_a_number_as_serve_demands():
    exported = VerifierFigures().take(LOAD, NO_DRAFTER) | drafter_figures(DrafterLoad())
    assert all(type(value) is float for value in exported.values())


def test_what_replicas_export_adds_up_to_the_pools_load():
    verifiers = [
        VerifierFigures().take(LOAD, NO_DRAFTER),
        VerifierFigures().take(dataclasses.replace(LOAD, price=0.25, counters=SECOND), NO_DRAFTER),
    ]
    loads = (DrafterLoad(num_sessions=3, queue_depth=1), DrafterLoad(queue_depth=4))
    drafters = [drafter_figures(load) for load in loads]
    assert pools_load(by_name(verifiers), by_name(drafters), num_verifiers=3, num_drafters=2) == PoolsLoad(
        verifiers=VerifiersLoad(
            num_replicas=3,
            num_ready=2,
            num_with_knee=2.0,
            num_requests=10.0,
            kv_usage=0.5,
            knee_fill=2.0 + (180 - 60) / 14 / 4.0,
            price=0.5,
            num_undrafted=4.0,
        ),
        drafters=DraftersLoad(num_replicas=2, num_ready=2, num_sessions=3.0, queue_depth=5.0, late_share=6 / 21),
    )


def by_name(replicas: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Turn {figure: value} of each replica into Serve's {figure: {replica: value}}."""
    return {name: {str(i): replica[name] for i, replica in enumerate(replicas)} for name in replicas[0]}


def test_pools_without_figures_have_nobody_ready():
    load = pools_load({}, {}, num_verifiers=1, num_drafters=0)
    assert load == PoolsLoad(
        verifiers=VerifiersLoad(num_replicas=1, num_ready=0, num_with_knee=0.0),
        drafters=DraftersLoad(num_replicas=0, num_ready=0),
    )
