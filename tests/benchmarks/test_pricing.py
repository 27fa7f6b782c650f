"""The benchmark of pricing on small steps and a clock of its own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.pricing import MACHINES, Machine, measure, pricing


def ticking(call_s: float):
    """Return a clock on which whatever is timed takes `call_s`."""
    times_s = itertools.count(0.0, call_s)
    return lambda: next(times_s)


@pytest.mark.parametrize(("machine", "learn_s", "meanwhile_s"), [(MACHINES[0], 0.5, 0.5), (MACHINES[1], 1.0, 0.0)])
def test_a_steps_four_calls_are_timed_and_nothing_else(machine: Machine, learn_s: float, meanwhile_s: float):
    row = measure(machine, 3, draft_length=4, num_steps=5, clock=ticking(0.5))
    assert (row.ask_s, row.cut_s, row.learn_s) == (0.5, 0.5, learn_s), "who has no drafts waits for all of it"
    assert row.meanwhile_s == meanwhile_s
    assert row.path_s == 1.0 + learn_s


def test_drafts_are_long_where_they_are_free_and_left_out_where_none_pays():
    free, dear = (measure(machine, 8, draft_length=4, num_steps=20, clock=ticking(1.0)) for machine in MACHINES)
    assert free.draft_length > 3.5
    assert dear.draft_length < 0.2


def test_the_verb_prints_and_writes(tmp_path: Path):
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(pricing, ["--num-requests", "1,2", "--num-steps", "2", "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert "none pays" in result.output
    rows = json.loads(path.read_text())
    assert [(row["machine"], row["num_requests"]) for row in rows] == [
        (machine.name, count) for machine in MACHINES for count in (1, 2)
    ]
    assert all(row["learn_s"] > 0.0 for row in rows)


def test_a_step_without_requests_is_refused():
    result = CliRunner().invoke(pricing, ["--num-requests", "8,0"])
    assert result.exit_code == 2
    assert "at least one request" in result.output
