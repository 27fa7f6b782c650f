"""What the tests of whole services share: the Ray that they stand on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.live_service import SharedRay


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[SharedRay]:
    shared_ray = SharedRay()
    yield shared_ray
    shared_ray.close()
