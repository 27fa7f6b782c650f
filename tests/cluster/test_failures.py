"""Every failure once, with real processes; `make soak` repeats each twenty times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from external_drafter import FAULTS, Fault
from failures import (
    FLEET_CASES,
    LINK_CASES,
    NUM_STREAMS,
    PARALLEL_CASES,
    Case,
    DrafterDrill,
    Drill,
    Outcome,
    drafter_drill,
    fleet_drill,
    parallel_drill,
)

pytestmark = pytest.mark.timeout(600)  # every replica that was lost starts again, on a busy machine in a minute

MAX_PAUSE_S = 60.0  # the only verifier of a service starts again
MAX_DRAFTER_PAUSE_S = 3.0  # a round's deadline is at most 1 s


@pytest.fixture(scope="module")
def fleet() -> Iterator[Drill]:
    with fleet_drill() as drill:
        yield drill


@pytest.fixture(scope="module")
def parallel() -> Iterator[Drill]:
    with parallel_drill() as drill:
        yield drill


@pytest.fixture(scope="module")
def drafter() -> Iterator[DrafterDrill]:
    with drafter_drill() as drill:
        yield drill


def require_unharmed(outcome: Outcome, max_pause_s: float) -> None:
    assert outcome.num_hung == outcome.num_lost == outcome.num_doubled == outcome.num_failed == 0, outcome
    assert outcome.longest_pause_s < max_pause_s, outcome


@pytest.mark.parametrize("case", FLEET_CASES, ids=lambda case: case.name)
def test_a_fleet_loses_nothing(fleet: Drill, case: Case):
    outcome = fleet.run(case, index=0)
    if case.ends_streams:
        assert outcome.num_failed == NUM_STREAMS, "its clients are told"
        assert outcome.num_hung == 0
    else:
        require_unharmed(outcome, MAX_PAUSE_S)


@pytest.mark.parametrize("case", PARALLEL_CASES, ids=lambda case: case.name)
def test_a_lost_rank_loses_nothing(parallel: Drill, case: Case):
    require_unharmed(parallel.run(case, index=0), MAX_PAUSE_S)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_bad_drafter_changes_nothing(drafter: DrafterDrill, fault: Fault):
    require_unharmed(drafter.run_fault(fault, index=0), MAX_DRAFTER_PAUSE_S)


@pytest.mark.parametrize("name", LINK_CASES)
def test_a_broken_link_changes_nothing(drafter: DrafterDrill, name: str):
    require_unharmed(drafter.run_link(name, index=0), MAX_DRAFTER_PAUSE_S)
