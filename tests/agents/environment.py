"""Where the agents are installed, which they are, and the mark of tests that need them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from pathlib import Path

import pytest

ENVIRONMENT = Path(os.environ.get("OUTRIDER_AGENTS_ENV", Path.home() / ".cache" / "outrider" / "agents-2026.11"))
INTERPRETER = ENVIRONMENT / "bin" / "python"
MODULES = ENVIRONMENT / "node" / "node_modules"
needs_agents = pytest.mark.skipif(
    not (ENVIRONMENT / ".ready").is_file(), reason=f"no agents are in {ENVIRONMENT}: make agents installs them"
)


def command(name: str) -> str:
    """Return the path of a command from the npm registry."""
    return str(MODULES / ".bin" / name)


def version_of(package: str) -> str:
    """Return the installed version of a package of either registry."""
    described = MODULES / package / "package.json"
    if described.is_file():
        return str(json.loads(described.read_text())["version"])
    return _python_versions()[package]


@functools.cache
def _python_versions() -> dict[str, str]:
    listed = subprocess.run(
        [INTERPRETER, "-m", "pip", "list", "--format=json", "--disable-pip-version-check"],
        capture_output=True,
        check=True,
    )
    return {package["name"]: package["version"] for package in json.loads(listed.stdout)}


def plain_environment(home: Path) -> dict[str, str]:
    """Return the variables of a client that has this folder to itself: none of the user's keys, no telemetry."""
    path = f"{ENVIRONMENT / 'bin'}:{os.environ['PATH']}"
    quiet = ("DO_NOT_TRACK", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")
    return {
        **dict.fromkeys((*quiet, "NO_COLOR", "OPENAI_AGENTS_DISABLE_TRACING", "LITELLM_LOCAL_MODEL_COST_MAP"), "1"),
        "PATH": path,
        "HOME": str(home),
        "LANG": "C.UTF-8",
    }
