from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from fakes.played import MACHINE
from outrider.lab.replay.replay import COLUMNS, DatasetResult, replay, replay_file, report_of
from outrider.lab.replay.traces import Figures, arms


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "loops.jsonl"
    request = {
        "prompt_token_ids": [1, 2, 3, 4],
        "generated_token_ids": [1, 2, 3, 4] * 5,
        "acc_eagle": {"acc_len": [2] * 20},
    }
    path.write_text((json.dumps(request) + "\n") * 3)
    return path


def test_the_module_loads_neither_torch_nor_rich() -> None:
    code = "import sys, outrider.lab.replay.replay; print({'torch', 'rich', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_recorded_drafters_stand_beside_every_arm(trace_file: Path):
    heard: list[tuple[str, float]] = []
    result = replay_file(trace_file, 2, 4, 16, lambda: 0.0, lambda name, done: heard.append((name, done)))
    assert (result.name, result.num_requests, result.num_tokens) == ("loops", 2, 40)
    assert [name for name, _ in result.rows] == ["recorded: eagle", *(arm.name for arm in arms(16))]
    assert result.rows[0][1].mean_acceptance_length == 2
    assert all(figures.mean_acceptance_length > 2 for _, figures in result.rows[1:])
    assert [name for name, _ in heard] == [arm.name for arm in arms(16)]
    assert heard[0][1] == 0
    assert heard[-1][1] < 1


def test_a_row_has_a_cell_under_every_heading():
    figures = Figures(num_draft_tokens=30, num_empty=1, draft_s=[1e-6, 3e-6, 2e-6], prompt_s=4e-6, num_prompt_tokens=8)
    for num_accepted in (2, 0, 1, 0):
        figures.add(num_accepted, num_accepted + 1)
    expected = ["n-gram", "1.750", "50.0 25.0  0.0  0.0  0.0  0.0", "7.50", "25%", "2.0", "3.0", "0.5"]
    assert [column.cell(("n-gram", figures)) for column in COLUMNS] == expected
    recorded = Figures()
    recorded.add(1, 2)
    assert [column.cell(("eagle", recorded)) for column in COLUMNS[3:]] == ["-"] * 5


def test_the_page_names_the_machine_and_says_what_the_names_mean():
    figures = Figures()
    figures.add(1, 2)
    result = DatasetResult(name="loops", num_requests=1, num_tokens=2, rows=[("recorded: eagle", figures)])
    page = report_of([result], MACHINE, 20).to_markdown()
    assert "Test CPU, 2 cores, 8 GiB" in page
    assert "**loops: 1 requests, 2 generated tokens**" in page
    assert "| recorded: eagle | 2.000 |" in page
    assert "mean acceptance length  generated tokens / verifications" in page


def test_the_verb_prints_tables_and_writes_the_page(trace_file: Path, tmp_path: Path):
    page = tmp_path / "REPLAY.md"
    done = CliRunner().invoke(replay, [str(trace_file), "--num-speculative-tokens", "4", "--markdown", str(page)])
    assert done.exit_code == 0, done.output
    assert "loops: 3 requests, 60 generated tokens" in done.output
    assert "suffix" in done.output
    assert "drafts of at most 4 tokens" in page.read_text()


@pytest.mark.parametrize(("text", "message"), [("", "holds no request"), ('{"prompt_token_ids": []}\n', "line 1")])
def test_a_bad_file_is_an_error_and_no_traceback(tmp_path: Path, text: str, message: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    done = CliRunner().invoke(replay, [str(path)])
    assert done.exit_code == 1
    assert message in done.output


def test_a_file_that_is_missing_is_refused(tmp_path: Path):
    assert CliRunner().invoke(replay, [str(tmp_path / "missing.jsonl")]).exit_code == 2
    assert CliRunner().invoke(replay, []).exit_code == 2
