"""What the tests of whole services share: the Ray that they stand on, and how long a soak is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.live_service import SharedRay
from soak_length import SoakLength


@pytest.fixture(scope="session")
def soak_length(pytestconfig: pytest.Config) -> SoakLength:
    return SoakLength(pytestconfig.getoption("--soak-runs"))


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[SharedRay]:
    shared_ray = SharedRay()
    yield shared_ray
    shared_ray.close()
