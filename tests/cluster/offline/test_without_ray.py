"""Generating where Ray is not installed: in a process in which importing it fails."""

from __future__ import annotations

import subprocess
import sys

WITHOUT_RAY = """
import sys

class NoRay:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "ray":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NoRay())
"""


def run(then: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT_RAY + then], capture_output=True, text=True)


def test_the_command_generates():
    done = run(
        "from outrider.cluster import LLM, SamplingParams; from outrider.cluster.cli.main import main; "
        "main(['generate', 'embedded', '--prompt', 'import os', '--max-tokens', '8', '--ignore-eos'])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_what_serves_says_that_ray_is_missing():
    done = run("import outrider.cluster.replicas.serving")
    assert done.returncode == 1
    assert "No module named 'ray'" in done.stderr
