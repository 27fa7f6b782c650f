"""The example of a drafter in a package of its own: installed away from this environment, and drafted with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rooms import ROOT

EXAMPLE = ROOT / "examples" / "drafter_plugin"
MAX_MODULE_LINES = 60
GENERATE = (
    *("-c", "from outrider.cluster.cli.main import main; main()"),
    *("generate", "embedded", "--max-tokens", "24", "--json"),
    *("--prompt", "def add(a, b):\n    return a + b\n\ndef add(a, b):\n"),
)


def run(*arguments: str | Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python, where `path` is given with the packages that are installed there beside the environment's own."""
    known = os.environ.get("PYTHONPATH")
    search = os.pathsep.join(str(folder) for folder in (path, known) if folder)
    environment = {**os.environ, **({"PYTHONPATH": search} if search else {})}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)


def record(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example in a folder of its own, installed from a copy: setuptools leaves build products beside its input."""
    scratch = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, scratch / "source")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", scratch / "site")
    result = run("-m", "pip", "install", *options, scratch / "source")
    assert result.returncode == 0, result.stderr[-2000:]
    return scratch / "site"


def test_the_tokens_are_those_of_plain_decoding_and_drafts_are_accepted(installed: Path):
    asked = json.dumps({"method": "bigram", "num_speculative_tokens": 3})
    plain = record(run(*GENERATE, "--speculation", "off"))
    drafted = record(run(*GENERATE, "--speculation", "always", "-sc", asked, path=installed))
    assert drafted["token_ids"] == plain["token_ids"]
    assert len(plain["token_ids"]) > 3
    assert drafted["metrics"]["speculative_decoding"]["num_accepted_tokens"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


def test_a_wrong_option_is_told_at_the_start_with_the_plug_ins_name(installed: Path):
    asked = json.dumps({"method": "bigram", "plugin_config": {"max_count": 3}})
    result = run(*GENERATE, "-sc", asked, path=installed)
    assert result.returncode == 2, result.stdout + result.stderr
    said = " ".join(result.stderr.replace("│", " ").split())
    assert "plugin 'bigram': it could not be built: ValueError: plugin_config: min_count" in said
    assert "Traceback" not in result.stderr


def test_where_it_is_not_installed_it_is_unknown_and_where_it_is_a_slip_of_the_pen_is_seen(installed: Path):
    for path, name, hint in ((None, "bigram", ""), (installed, "bigarm", "; did you mean 'bigram'?")):
        result = run(*GENERATE, "-sc", json.dumps({"method": name}), path=path)
        assert result.returncode == 2, result.stdout + result.stderr
        assert f"unknown method '{name}'{hint}" in result.stderr
        assert "outrider.drafters" in result.stderr


def test_the_example_is_one_short_module():
    (module,) = EXAMPLE.glob("*.py")
    assert len(module.read_text().splitlines()) <= MAX_MODULE_LINES
