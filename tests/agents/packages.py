"""Libraries for agents: each has a script here that runs in their environment, as a user's program would."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agents import words
from agents.environment import INTERPRETER, plain_environment

FOLDER = Path(__file__).parent
TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A library, on one of our APIs."""

    package: str
    api: str
    script: str
    lacks: Mapping[str, str] = field(default_factory=dict)  # columns without a meaning, and why

    def tries(self, server: str, folder: Path) -> dict[str, str]:
        """Return by column what went wrong, or nothing."""
        found = folder / "found.json"
        ended = subprocess.run(
            [INTERPRETER, FOLDER / self.script, server, self.api, found],
            env=plain_environment(folder),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        read: dict[str, str] = json.loads(found.read_text())
        return read


PACKAGES = (
    Package(package="anthropic", api="messages", script="speak_anthropic.py"),
    Package(package="openai-agents", api="responses", script="speak_openai_agents.py"),
    Package(package="openai-agents", api="chat", script="speak_openai_agents.py"),
    Package(package="pydantic-ai-slim", api="chat", script="speak_pydantic_ai.py"),
    Package(package="pydantic-ai-slim", api="responses", script="speak_pydantic_ai.py"),
    Package(package="pydantic-ai-slim", api="messages", script="speak_pydantic_ai.py"),
    Package(
        package="langchain-openai",
        api="chat",
        script="speak_langchain.py",
        lacks={words.REASONING: "drops reasoning of chats"},
    ),
    Package(package="langchain-openai", api="responses", script="speak_langchain.py"),
    Package(package="litellm", api="chat", script="speak_litellm.py"),
    Package(package="litellm", api="messages", script="speak_litellm.py"),
)
