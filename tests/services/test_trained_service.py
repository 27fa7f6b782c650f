"""A live service whose weights a trainer changes, and processes that end meanwhile; `make soak` has more failures."""

from __future__ import annotations

import pytest

from services.failures import MAX_PAUSE_S, Case, require_unharmed
from services.live_service import SharedRay
from services.trained import TAKEN, TRAINER_KILLED, VERIFIER_KILLED, TrainedDrill, trained_drill

# a verifier that was lost starts again, on a busy machine in a minute
pytestmark = [pytest.mark.service, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def trained(shared_ray: SharedRay) -> TrainedDrill:
    return trained_drill(shared_ray)


@pytest.mark.parametrize("case", [TAKEN, VERIFIER_KILLED, TRAINER_KILLED], ids=lambda case: case.name)
def test_streams_lose_nothing(trained: TrainedDrill, case: Case):
    require_unharmed(trained.run(case, index=1), max_pause_s=MAX_PAUSE_S)
