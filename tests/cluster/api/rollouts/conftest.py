"""What the trainers' tests share: one service with doors, brought back to its first weights before each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tiny.rollout_service import Reference, RolloutService


@pytest.fixture(scope="session")
def running_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutService]:
    service = RolloutService(tmp_path_factory.mktemp("rollouts"))
    yield service
    service.close()


@pytest.fixture
def service(running_service: RolloutService) -> RolloutService:
    running_service.begin_anew()
    return running_service


@pytest.fixture(scope="session")
def old() -> Reference:
    return Reference(is_new=False)


@pytest.fixture(scope="session")
def new() -> Reference:
    return Reference(is_new=True)
