"""`make study NAME=far`: one short scenario, and figures beside those of an earlier run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.draft_lengths import far
from benchmarks.study import study

SHORT = far.Scenario(name="short, 1", level_s=0.001, num_requests=4)


def test_good_drafts_of_a_quick_drafter_bring_something_and_orders_differ():
    found = [far.speed_of_off(SHORT, order) for order in range(2)]
    assert min(found) > 1.1
    assert found[0] != found[1]


def test_figures_are_shown_beside_earlier_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(far, "SCENARIOS", (SHORT,))
    (tmp_path / "earlier.json").write_text(json.dumps({"short, 1": [0.5]}))
    options = ["--orders", "1", "--json", str(tmp_path / "now.json"), "--beside", str(tmp_path / "earlier.json")]
    shown = CliRunner().invoke(study, ["far", *options])
    assert shown.exit_code == 0, shown.output
    (figure,) = json.loads((tmp_path / "now.json").read_text())["short, 1"]
    assert f"| short, 1 | {figure:.3f} | {figure:.3f} | 0.500 | {2 * figure:.3f} | {2 * figure:.3f} |" in shown.output
