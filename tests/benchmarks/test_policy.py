"""`make study NAME=policy`: the table from a folder of traces, and what it says of the points that miss."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.draft_lengths.table import Point, count_points, run_table
from benchmarks.policy import COLUMNS, verdict
from benchmarks.study import study
from outrider.lab.replay.machine import EAGLE
from outrider.lab.replay.traces import NGRAM, Trace


def point(**changed: object) -> Point:
    fields: dict[str, object] = {
        "dataset": "prose",
        "drafter": "EAGLE",
        "batch_size": 8,
        "off_throughput": 1000.4,
        "fixed": (1.2, 1.4, 1.5, 1.45, 1.3, 1.2, 1.1, 0.9),
        "adaptive": 1.53,
        "oracle": 1.56,
        "clairvoyant": 2.0,
        "adaptive_length": 2.5,
        "oracle_length": 3.25,
    }
    return Point(**(fields | changed))  # type: ignore[arg-type]


def test_the_table_s_entry_is_the_best_fixed_length_and_may_be_none() -> None:
    assert (point().table, point().table_length, point().of_table) == (1.5, 3, 1.53 / 1.5)
    slower = point(fixed=(0.9,) * 8, adaptive=0.99)
    assert (slower.table, slower.table_length, slower.of_table) == (1.0, 0, 0.99)
    assert point().of_oracle == 1.53 / 1.56


def test_a_point_is_met_by_both_measures() -> None:
    assert point().is_met
    assert not point(oracle=1.59).is_met
    assert not point(adaptive=1.49, oracle=1.5).is_met


def test_a_point_may_miss_by_no_more_than_noise() -> None:
    near = point(adaptive=1.498, oracle=1.54, of_table_error=0.001)
    assert (near.is_met, near.is_met_but_for_noise) == (False, True)
    assert not point(adaptive=1.498, oracle=1.54, of_table_error=0.0005).is_met_but_for_noise
    assert COLUMNS[-1].cell(near) == "0.999 ± 0.001"
    said = verdict([point(), near])
    assert "at 1 of 2 points, within two standard errors at 2" in said
    assert "- within two standard errors at prose, EAGLE, batch 8: 0.9727 of the oracle, 0.99867 ± 0.00100" in said


TRACE = Trace(prompt_ids=[1, 2, 3], generated_ids=list(range(100, 130)), recorded={EAGLE: [4, 3, 2, 1, 1] * 6})


def test_drafters_that_were_not_recorded_are_left_out() -> None:
    both = Trace(
        prompt_ids=TRACE.prompt_ids,
        generated_ids=TRACE.generated_ids,
        recorded={EAGLE: TRACE.recorded[EAGLE], NGRAM: [1] * 30},
    )
    datasets = [("one", [TRACE]), ("both", [both])]
    heard: list[Point] = []
    points = run_table(datasets, (1,), min_tokens=60, on_point=heard.append)
    assert [(p.dataset, p.drafter) for p in points] == [
        ("one", "EAGLE"),
        ("both", "n-gram"),
        ("both", "EAGLE"),
        ("both", "hybrid"),
    ]
    assert heard == points
    assert count_points(datasets, (1, 2, 4)) == 12
    assert points[2].clairvoyant > points[2].oracle > 1.0
    assert points[1].oracle == 1.0  # prompt lookup finds nothing here


def test_repeats_are_queues_of_other_orders_and_say_how_certain_the_mean_is() -> None:
    other = replace(TRACE, recorded={EAGLE: [1 + position % 3 for position in range(30)]})
    play = partial(run_table, [("two", [TRACE, other])], (1,), min_tokens=60)
    (once,), (thrice,) = play(), play(num_repeats=3)
    assert (once.of_table_error, thrice.of_table_error > 0.0) == (0.0, True)
    assert thrice.off_throughput == pytest.approx(once.off_throughput, rel=0.05)
    assert thrice.fixed != once.fixed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "traces").mkdir()
    line = {
        "prompt_token_ids": TRACE.prompt_ids,
        "generated_token_ids": TRACE.generated_ids,
        "acc_eagle": {"acc_len": TRACE.recorded[EAGLE]},
    }
    (tmp_path / "traces" / "tiny.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "traces" / "README.md").write_text("no trace")
    return tmp_path


def test_the_verb_prints_tables_and_writes_both_files(folder: Path) -> None:
    options = ["--batch-sizes", "1,3", "--num-tokens", "50"]
    files = ["--json", f"{folder}/policy.json", "--markdown", f"{folder}/policy.md"]
    done = CliRunner().invoke(study, ["policy", f"{folder}/traces", *options, *files])
    assert done.exit_code == 0, done.output
    assert "tiny, EAGLE" in done.output
    document = json.loads((folder / "policy.json").read_text())
    assert [p["batch_size"] for p in document["points"]] == [1, 3]
    assert "**tiny, EAGLE**" in (folder / "policy.md").read_text()
