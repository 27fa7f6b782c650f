"""`outrider make-head --tiny`, run in this process with a tiny target: every phase once, and going on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fakes.backend import BRACKETS, build_tokenizer
from fakes.command_line import assert_usage_error, invoke
from tiny.models import make_checkpoint

PHASES = ["corpus", "training", "new head, chain", "new head, tree"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("head") / "target"
    tokenizer = build_tokenizer(BRACKETS)
    make_checkpoint(folder, vocab_size=len(tokenizer), num_hidden_layers=4)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make(target: str, output: Path, *options: str):
    small = ("--tiny", "--device", "cpu", "--draft-vocab-size", "200", "--max-model-len", "256")
    return invoke("make-head", target, "--output", str(output), *small, *options)


def test_a_head_is_made_judged_by_serving_and_gone_on_with(target: str, tmp_path: Path):
    cut = make(target, tmp_path, "--minutes", "0.0001")  # the first phase begins with time and ends without
    assert cut.exit_code == 1, cut.output
    assert "training: no time is left; the same command goes on here" in cut.output
    assert not (tmp_path / "head").exists()
    corpus = (tmp_path / "corpus" / "shard-00000.npz").read_bytes()

    done = make(target, tmp_path)
    assert done.exit_code == 0, done.output
    assert "corpus: done before" in done.output
    assert "training: an EAGLE-3 head learns from 2 windows of 128 tokens a step" in done.output
    assert (tmp_path / "corpus" / "shard-00000.npz").read_bytes() == corpus

    found = json.loads((tmp_path / "figures.json").read_text())["phases"]
    assert list(found) == PHASES
    assert found["training"]["figures"]["num_steps"] == 3
    for phase in PHASES[2:]:
        for served in found[phase]["figures"]["served"]:
            assert served["drafter"] == phase
            assert 1 <= served["tokens_per_verification"]["all"] <= 5
            # 3 prompts of at most 8 tokens, the first of each is no verification's; an untrained target may end early
            assert sum(rounds["num_committed"] for rounds in served["by_kind"].values()) > 7
    page = (tmp_path / "figures.md").read_text()
    assert page in done.output
    assert all(f"| {phase} | " in page for phase in PHASES)
    assert "| new head, tree | seeded | " in page
    assert (tmp_path / "head" / "config.json").exists()

    again = make(target, tmp_path)
    assert again.exit_code == 0, again.output
    assert all(f"{phase}: done before" in again.output for phase in PHASES)
    assert json.loads((tmp_path / "figures.json").read_text())["phases"] == found
    assert_usage_error(make(target, tmp_path, "--rows", "3"), "sizes: ", "does not go on with what")


def test_help_loads_neither_torch_nor_rich() -> None:
    code = "import sys, outrider.lab.cli.make_head; print({'torch', 'rich', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
