"""Agents of the command line do with our service what they do with their own: make agents installs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.command_lines import AGENTS, Agent
from agents.environment import needs_agents
from agents.words import COLUMNS

pytestmark = [pytest.mark.service, pytest.mark.timeout(600), needs_agents]


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: f"{agent.package} {agent.api}")
def test_an_agent_has_its_turns(agent: Agent, server: str, tmp_path: Path) -> None:
    found = agent.tries(server, tmp_path)
    assert found.keys() == set(COLUMNS) - agent.lacks.keys()
    assert {column: failure for column, failure in found.items() if failure} == {}
