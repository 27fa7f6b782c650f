"""The verbs of `outrider bench`: what they refuse, and that asking for help loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fakes.backend import build_tokenizer
from outrider.lab.cli.bench import bench
from tiny.models import make_checkpoint


def test_the_group_loads_neither_torch_nor_rich() -> None:
    code = "import sys, outrider.lab.cli.bench; print({'torch', 'rich', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "qwen2")
    build_tokenizer().save_pretrained(folder)
    (folder / "prompts.jsonl").write_text('{"prompt_token_ids": [5, 6, 7]}\n{"prompt_token_ids": [9]}\n')
    return folder


def invoke(model: Path, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(bench, [options[0], str(model), "--prompts", f"{model}/prompts.jsonl", *options[1:]])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("throughput", "--concurrency", "1;4"), "expected numbers"),
        (("throughput", "--concurrency", "0"), "concurrency must be"),
        (("latency", "--repeats", "0"), "repeats must be"),
        (("latency", "--inflate", "1e6"), "only Llama checkpoints can be inflated"),
        (("latency", "--max-tokens", "254"), "max_tokens must be at most 253"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(model: Path, options: tuple[str, ...], message: str) -> None:
    code, output = invoke(model, *options)
    assert code == 2
    assert message in " ".join(output.split())


def test_a_run_prints_a_table_and_writes_both_files(model: Path, tmp_path: Path) -> None:
    document, page = tmp_path / "bench.json", tmp_path / "bench.md"
    files = ("--json", str(document), "--markdown", str(page))
    small = ("--repeats", "1", "--max-tokens", "6", "--num-prompts", "1")
    code, output = invoke(model, "latency", *small, "--num-speculative-tokens", "0", *files)  # else look-ups draft
    assert code == 0, output
    assert "Outrider off" in output
    rows = json.loads(document.read_text())["rows"]
    assert [(row["arm"], row["concurrency"], row["first_differences"]) for row in rows] == [
        ("transformers generate", 1, {}),
        ("Outrider off", 1, {}),
    ]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert "| Outrider off |" in page.read_text()
