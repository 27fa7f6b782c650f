"""The study of what drafters are served at, on the embedded model."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from benchmarks.acceptance import acceptance


def test_every_drafter_is_measured_greedy_and_seeded(tmp_path: Path):
    page = tmp_path / "page.md"
    sizes = ["--num-prompts", "3", "--max-tokens", "12", "--concurrency", "2", "--markdown", str(page)]
    heads = ["--drafter", 'EAGLE-3={"method": "eagle3"}', "--drafter", 'n-gram={"method": "ngram"}']
    result = CliRunner().invoke(acceptance, ["embedded", *heads, *sizes])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("|")] for line in page.read_text().splitlines() if line[:1] == "|"]
    assert rows[0][1:7] == ["drafter", "sampling", "all", "fact", "explain", "write"]
    assert [row[1:3] for row in rows[2:]] == [
        [name, sampling] for name in ("EAGLE-3", "n-gram") for sampling in ("greedy", "seeded")
    ]
    assert all(1.0 <= float(cell) <= 5.0 for row in rows[2:] for cell in row[3:7])
    assert float(rows[2][3]) > 1.0, "the head was served"
