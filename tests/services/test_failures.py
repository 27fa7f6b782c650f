"""Every failure once, with real processes; `make soak` repeats each twenty times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from services.external_drafter import FAULTS, Fault
from services.failures import (
    FLEET_CASES,
    LINK_CASES,
    PARALLEL_CASES,
    Case,
    DrafterDrill,
    Drill,
    Outcome,
    drafter_drill,
    fleet_drill,
    parallel_drill,
    require_unharmed,
)

# every replica that was lost starts again, on a busy machine in a minute
pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]

MAX_PAUSE_S = 60.0  # the only verifier of a service starts again
MAX_DRAFTER_PAUSE_S = 3.0  # a round's deadline is at most 1 s


@pytest.fixture(scope="module")
def drill(request: pytest.FixtureRequest) -> Iterator[Drill | DrafterDrill]:
    """What a test's `drills` names; the one before is closed first: two services in a process would share its Ray."""
    with request.param() as opened:
        yield opened


def drills(opener: Callable[[], AbstractContextManager[Drill | DrafterDrill]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("drill", [opener], indirect=True, ids=[opener.__name__])


def require_short_pause(outcome: Outcome, max_pause_s: float, *, num_failed: int = 0) -> None:
    require_unharmed(outcome, num_failed=num_failed)
    assert outcome.longest_pause_s < max_pause_s, outcome


@drills(fleet_drill)
@pytest.mark.parametrize("case", FLEET_CASES, ids=lambda case: case.name)
def test_a_fleet_loses_nothing(drill: Drill, case: Case):
    require_short_pause(drill.run(case, index=0), MAX_PAUSE_S, num_failed=case.num_failing_streams)


@drills(parallel_drill)
@pytest.mark.parametrize("case", PARALLEL_CASES, ids=lambda case: case.name)
def test_a_lost_rank_loses_nothing(drill: Drill, case: Case):
    require_short_pause(drill.run(case, index=0), MAX_PAUSE_S)


@drills(drafter_drill)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_bad_drafter_changes_nothing(drill: DrafterDrill, fault: Fault):
    require_short_pause(drill.run_fault(fault, index=0), MAX_DRAFTER_PAUSE_S)


@drills(drafter_drill)
@pytest.mark.parametrize("name", LINK_CASES)
def test_a_broken_link_changes_nothing(drill: DrafterDrill, name: str):
    require_short_pause(drill.run_link(name, index=0), MAX_DRAFTER_PAUSE_S)
