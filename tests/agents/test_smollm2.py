"""Agents' first turns with a real model, which answers nonsense: each request is taken, streams and ends.

Qwen Code's prompt is longer than SmolLM2's context: it is told so by the overflow that its test has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import words
from agents.command_lines import CLAUDE, CODEX, OPENCODE, Agent
from agents.environment import needs_agents
from agents.relay import Exchange
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.serving import running_service
from outrider.verifier_service.model.ranks import free_ports

pytestmark = [pytest.mark.service, pytest.mark.timeout(900), needs_agents]

ENDS = (b"data: [DONE]", b'"type":"message_stop"', b'"type":"response.completed"', b'"type":"response.incomplete"')


@pytest.fixture(scope="module")
def smollm2() -> Iterator[str]:
    port, grpc_port = free_ports(2)
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    config = ServiceConfig(model=words.MODEL, port=port, grpc_port=grpc_port, **parsers)
    with running_service(config, lambda phase: None) as running:
        yield f"http://{running.host}:{running.port}"


def has_ended(exchange: Exchange) -> bool:
    last = exchange.answer.rstrip().rpartition(b"\n\n")[2]
    return exchange.status == 200 and exchange.num_events > 0 and any(end in last for end in ENDS)


@pytest.mark.parametrize("agent", [CODEX, CLAUDE, OPENCODE], ids=lambda agent: agent.package)
def test_a_first_turn_is_taken_streams_and_ends(agent: Agent, smollm2: str, tmp_path: Path) -> None:
    ran = agent.run(smollm2, tmp_path, words.ASK_GREETING)
    assert ran.exchanges
    assert [exchange.answer[-300:] for exchange in ran.exchanges if not has_ended(exchange)] == []
