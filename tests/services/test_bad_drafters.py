"""Drafters and links that fail under a verifier's streams, each once: over the engine's own loop and link, without Ray.

`make soak` repeats them against whole services.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.external_drafter import FAULTS, MORE_FAULTS, Fault
from services.failures import LINK_CASES, MAX_DRAFTER_PAUSE_S, DrafterDrill, local_drill, require_unharmed

pytestmark = pytest.mark.slow  # all of it: each waits until the drafter is asked again


@pytest.fixture(scope="module")
def drill() -> Iterator[DrafterDrill]:
    with local_drill() as drill:
        yield drill


@pytest.mark.parametrize("fault", FAULTS + MORE_FAULTS, ids=lambda fault: fault.name)
def test_a_bad_drafter_changes_nothing(drill: DrafterDrill, fault: Fault):
    require_unharmed(drill.run_fault(fault, index=0), max_pause_s=MAX_DRAFTER_PAUSE_S)


@pytest.mark.parametrize("name", LINK_CASES)
def test_a_broken_link_changes_nothing(drill: DrafterDrill, name: str):
    require_unharmed(drill.run_link(name, index=0), max_pause_s=MAX_DRAFTER_PAUSE_S)
