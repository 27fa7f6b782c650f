"""examples/train_and_serve_head.sh, run as it is: heads are trained for the embedded target and draft for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_and_serve_head.sh"
MAIN = "from outrider.cluster.cli.main import main; main()"


def commands_of_this_checkout(folder: Path) -> str:
    """Write `python` and `outrider` as this interpreter sees them; return a PATH that begins with them."""
    for name, arguments in {"python": "", "outrider": f"-c '{MAIN}'"}.items():
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        command.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_heads_are_trained_and_draft(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    done = subprocess.run(
        [EXAMPLE, tmp_path / "heads", "2"],
        env={**os.environ, "PATH": commands_of_this_checkout(tmp_path / "bin"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "heads").iterdir()} >= {"config.json", "acceptance.json"}
    (answer,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"request_id"')]
    assert len(answer["token_ids"]) == 16
    speculation = answer["metrics"]["speculative_decoding"]
    assert speculation["num_draft_tokens"] >= speculation["num_drafts"] > 0
    served = done.stdout.splitlines()[-1].partition("-sc ")[2].strip("'")
    assert json.loads(served)["model"] == str(tmp_path / "heads")


def test_without_a_folder_it_says_what_is_missing() -> None:
    done = subprocess.run([EXAMPLE], capture_output=True, text=True)
    assert done.returncode != 0
    assert "say where the heads shall go" in done.stderr
