"""Table, Markdown and JSON of a benchmark say the same, and say what differed."""

from __future__ import annotations

import dataclasses
import io
import json

import click
import pytest
from rich.console import Console

from fakes.played import MACHINE
from outrider.lab.bench.figures import (
    LIBRARY,
    LIBRARY_ASSISTED,
    SHARED,
    BenchResult,
    Figures,
    Row,
    Workload,
)
from outrider.lab.bench.report import THROUGHPUT_COLUMNS, footnotes, report_of
from outrider.lab.cli.bench import report
from outrider.lab.same_tokens import Difference, Tally

FIGURES = Figures(
    tokens_per_s=123.44,
    acceptance_rate=None,
    mean_acceptance_length=None,
    time_to_first_token_p50_s=0.0123,
    inter_token_p50_s=0.00456,
    inter_token_p99_s=None,
    bandwidth_share=0.421,
    num_target_steps=77,
    num_empty_rounds=0,
)
SPECULATED = dataclasses.replace(FIGURES, acceptance_rate=0.62, mean_acceptance_length=3.48, num_empty_rounds=2)


def row(arm: str, figures: Figures, *, concurrency: int = 1, pair: str = "as shipped", **changes: object) -> Row:
    fields = {"ratio": 1.0, "repeats": (figures, figures), "first_differences": {}} | changes
    return Row(pair=pair, concurrency=concurrency, arm=arm, figures=figures, **fields)


def result(*rows: Row, temperature: float = 0.0, tallies: tuple[Tally, ...] = ()) -> BenchResult:
    return BenchResult(
        machine=MACHINE,
        target="/target",
        draft="/draft",
        baseline=LIBRARY,
        workload=Workload(prompts=((1, 2), (3,)), max_tokens=32, temperature=temperature),
        repeats=2,
        read_bytes_per_s={1: 8e9, 2: 15e9},
        rows=rows,
        tallies=tallies,
    )


PLAIN = row(LIBRARY, FIGURES)
OURS = row(SHARED, SPECULATED, ratio=2.5)
DIFFERING = row(SHARED, SPECULATED, ratio=2.5, concurrency=4, first_differences={1: 17})


def drawn(shown: BenchResult, columns: tuple = THROUGHPUT_COLUMNS) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(report_of(shown, columns).to_table())
    return console.file.getvalue()


def test_table_and_page_show_the_same_cells() -> None:
    cells = [SHARED, "123.4", "2.50", "62 %", "3.48", "12.3 ms", "4.56 ms", "-", "42 %", "77"]
    line = next(line for line in drawn(result(PLAIN, OURS)).splitlines() if SHARED in line and "123.4" in line)
    assert [cell.strip() for cell in line.strip("│").split("│")] == cells
    assert (
        "| " + " | ".join(cells) + " |" in report_of(result(PLAIN, OURS), THROUGHPUT_COLUMNS).to_markdown().splitlines()
    )


def test_differing_tokens_are_told() -> None:
    differing = result(PLAIN, OURS, DIFFERING, tallies=(Tally(num_answers=12),))
    note, verdict = [note for note in footnotes(differing) if "greedy tokens differ" in note or "repeats" in note][-2:]
    assert verdict == "Of Outrider's own, over all repeats: all 12 answers are identical."
    assert f"as shipped, concurrency 4, {SHARED}: 1." in note
    assert "concurrency 1," not in note
    assert any("differ" in note and "none, in any arm" in note for note in footnotes(result(PLAIN, OURS)))


def test_a_difference_is_an_error_after_table_and_files(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    difference = Difference(what=SHARED, place=2, margin=0.1, expected="a b c", given="a b d")
    differing = result(PLAIN, DIFFERING, tallies=(Tally(num_answers=12, differences=(difference,)),))
    with pytest.raises(click.ClickException, match="1 of 12 answers differ"):
        report(differing, THROUGHPUT_COLUMNS, tmp_path / "bench.json", tmp_path / "bench.md")
    for said in (capsys.readouterr().out, (tmp_path / "bench.json").read_text(), (tmp_path / "bench.md").read_text()):
        assert "1 of 12 answers differ" in " ".join(said.split())


def test_sampled_tokens_are_not_compared() -> None:
    notes = footnotes(result(row(SHARED, SPECULATED, first_differences=None), temperature=0.8))
    assert "Sampled tokens are not compared." in notes
    assert not any("greedy" in note for note in notes)


def test_reservations_stand_where_they_apply() -> None:
    def says(words: str, *rows: Row) -> bool:
        return any(words in note for note in footnotes(result(*rows)))

    assert says("one after another", row(LIBRARY_ASSISTED, SPECULATED, concurrency=4))
    assert not says("one after another", row(LIBRARY_ASSISTED, SPECULATED), row(LIBRARY, FIGURES, concurrency=4))
    assert says("cost ratio", row(LIBRARY, FIGURES, pair="target inflated to 100 M"))
    assert not says("cost ratio", PLAIN)
    assert says(f"without a draft though speculation was on: as shipped, concurrency 1, {SHARED}: 2.", PLAIN, OURS)
    assert not says("without a draft", PLAIN)


def test_json_has_every_figure_of_every_repeat() -> None:
    document = json.loads(json.dumps(report_of(result(PLAIN, DIFFERING), THROUGHPUT_COLUMNS).to_json()))
    assert document["machine"]["cpu"] == "Test CPU"
    assert document["workload"] == {
        "num_prompts": 2,
        "max_tokens": 32,
        "temperature": 0.0,
        "num_speculative_tokens": 4,
    }
    assert document["read_bytes_per_s"] == {"1": 8e9, "2": 15e9}
    assert "inter-token time" in document["definitions"]
    names = {field.name for field in dataclasses.fields(Figures)}
    for entry in document["rows"]:
        assert entry.keys() == names | {"pair", "concurrency", "arm", "ratio", "repeats", "first_differences"}
        assert [repeat.keys() for repeat in entry["repeats"]] == [names, names]
    assert document["rows"][1]["first_differences"] == {"1": 17}
    assert document["rows"][1]["tokens_per_s"] == 123.44
