"""The service that all agents ask: ours, around a model that is played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agents.script import agents_config, agents_spec
from outrider.lab.gateway.played_service import played_service


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    config = agents_config()
    with played_service(config, agents_spec(config)) as running:
        yield f"http://{running.host}:{running.port}"
