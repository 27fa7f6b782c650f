"""The study of objectives: survival by position, differences seed by seed, and that what was run is not run again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.training.objectives import Served, half_width, objectives, read_results, to_rows

CE = Served(
    method="eagle3", objective="ce", seed=0, sampling="greedy", num_drafts=100, num_rounds=110, num_committed=195,
    accepted=(60, 25),
)  # fmt: skip


def served(**lengths: list[float]) -> list[Served]:
    """Return cells of so many tokens per verification, by objective and seed."""
    return [
        replace(CE, objective=objective, seed=seed, num_rounds=1000, num_committed=round(1000 * length))
        for objective, own in lengths.items()
        for seed, length in enumerate(own)
    ]


def cells(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_survival_is_the_share_of_drafts_that_came_so_far() -> None:
    assert CE.survival(4) == [0.6, 0.25, 0.0, 0.0]
    assert CE.tokens_per_verification == pytest.approx(195 / 110)
    headings, _, row = cells(to_rows([CE], 3))
    assert headings[4:] == ["beside ce", "", "S_1", "S_2", "S_3"]
    assert row == ["eagle3", "greedy", "ce", "1.773", "", "", "0.600", "0.250", "0.000"]


def test_a_difference_is_taken_seed_by_seed() -> None:
    """Seeds differ by more than objectives; student's quantile of two degrees of freedom is 4.303."""
    rows = cells(to_rows(served(ce=[1.5, 1.7, 1.9], tv=[1.4, 1.75, 1.95], streak=[1.55, 1.74, 1.96]), 2))[2:]
    assert [row[3] for row in rows] == ["1.700 ± 0.200", "1.700 ± 0.278", "1.750 ± 0.205"]
    assert [row[4:6] for row in rows] == [
        ["", ""],
        ["+0.000 ± 0.215", "noise"],
        ["+0.050 ± 0.025", "beyond noise"],
    ]
    assert half_width([0.05, 0.04, 0.06]) == pytest.approx(4.3027 * 0.01 / 3**0.5, rel=1e-4)


def test_what_was_run_is_read_and_not_run_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    found = served(ce=[1.5], tv=[1.4], streak=[1.6])
    results.write_text("".join(f"{json.dumps(asdict(each))}\n" for each in found))
    assert read_results(results) == found
    page = tmp_path / "page.md"
    options = ["--method", "eagle3", "--seeds", "0", "--results", str(results), "--markdown", str(page)]
    done = CliRunner().invoke(objectives, options, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "| eagle3 | greedy | streak | 1.600 | +0.100 | one seed |" in page.read_text()
    done = CliRunner().invoke(objectives, ["--seeds", "0,x"])
    assert "expected integers with commas" in done.output
