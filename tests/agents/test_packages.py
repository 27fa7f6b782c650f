"""Libraries for agents do with our service what they do with others: make agents installs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.environment import needs_agents
from agents.packages import PACKAGES, Package
from agents.words import COLUMNS

pytestmark = [pytest.mark.service, pytest.mark.timeout(600), needs_agents]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: f"{package.package} {package.api}")
def test_a_library_does_what_its_users_ask(package: Package, server: str, tmp_path: Path) -> None:
    found = package.tries(server, tmp_path)
    assert found.keys() == set(COLUMNS) - package.lacks.keys()
    assert {column: failure for column, failure in found.items() if failure} == {}
