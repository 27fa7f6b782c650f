"""One report: the table, the page and the document say the same, and a page knows what it said before."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from outrider.lab.report import Column, Report, Section, number


def report_of(figure: float) -> Report[tuple[str, float]]:
    return Report(
        title="a machine; some work",
        columns=[Column("arm", lambda row: row[0]), Column("tokens/s", lambda row: number(row[1], 1))],
        sections=[Section("one", [("off", 1234.56)]), Section("two", [("on", figure)])],
        notes=["a note"],
        heading="A page",
        command="make study NAME=x",
        definitions="words",
        document={"figure": figure},
    )


def test_table_page_and_document_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_of(2.0).show(80, tmp_path / "x.json", tmp_path / "x.md")
    table, page = capsys.readouterr().out, (tmp_path / "x.md").read_text()
    assert [re.findall(r"[\w,.]+", line) for line in table.splitlines() if "│" in line][1:] == [
        *(["off", "1,234.6"], ["two"], ["on", "2.0"])
    ]
    assert page.splitlines()[4:11] == [
        "**one**",
        "",
        "| arm | tokens/s |",
        "|---|---:|",
        "| off | 1,234.6 |",
        "",
        "**two**",
    ]
    assert re.match(r"# A page\n\n`make study NAME=x`, \d{4}-\d\d-\d\d: a machine; some work\n", page)
    found = json.loads((tmp_path / "x.json").read_text())
    assert found == {"format_version": 1, "definitions": "words", "figure": 2.0}


def test_a_page_keeps_what_it_said_of_itself_before(tmp_path: Path) -> None:
    page = tmp_path / "x.md"
    for figure in (1.0, 2.0, 3.0):
        report_of(figure).show(80, markdown_file=page)
    lines = page.read_text().splitlines()
    assert "| on | 3.0 |" in lines
    assert lines[-2] == lines[-1]
    assert lines[-1].startswith("- before: `make study NAME=x`, ")


def test_what_was_not_measured_is_shown_as_such() -> None:
    assert number(None, 2) == "-"
    assert number(0.126, 0, 100, " %") == "13 %"
