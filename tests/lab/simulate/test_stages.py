"""Drafts on stages and experts: cases that are known by hand, and what the verb prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cluster.cli.main import main
from outrider.lab.simulate.accelerators import ACCELERATORS, StepTiming
from outrider.lab.simulate.load import LengthLaw
from outrider.lab.simulate.stages import AHEAD, BETWEEN, LOADS, OFF, OWN_STAGE, ExpertDevices, Pipeline, study_stages
from outrider.lab.simulate.system import System

SYSTEM = System.of(ACCELERATORS["H100"], target_params=70e9, draft_params=1e9)
SECOND = StepTiming(compute_token_s=0.0, base_s=1.0, context_token_s=0.0, overhead_s=0.0)
PIPELINE = Pipeline(
    num_stages=4,
    stage=SECOND,
    draft=replace(SECOND, base_s=0.25),
    hop_s=0.0,
    hop_row_s=0.0,
    link_s=0.0,
    context=0.0,
)


def test_one_group_leaves_bubbles_and_as_many_as_stages_leave_none():
    assert PIPELINE.rate(OFF, 4, 1, 0, 0.0) == 1.0
    assert PIPELINE.rate(OFF, 4, 4, 0, 0.0) == 1.0, "four groups of one take as long a pass, one behind the other"
    assert PIPELINE.rate(OFF, 8, 8, 0, 0.0) == 1.0, "more groups than stages wait for each other"


@pytest.mark.parametrize(
    ("way", "num_groups", "seconds"),
    [
        (BETWEEN, 1, 4.0 + 0.5),  # a pass, then two levels of the draft
        (BETWEEN, 4, 4 * (1.0 + 0.5)),  # the last stage's device drafts for each group
        (OWN_STAGE, 4, 4.0 + 0.5),  # the drafter's time of one group is hidden behind the others' stages
        (OWN_STAGE, 5, 5.0),
    ],
)
def test_a_round_is_a_pass_and_a_draft_or_what_its_busiest_device_takes(way: str, num_groups: int, seconds: float):
    tokens = 20 * (1 + 0.5 + 0.25)
    assert PIPELINE.rate(way, 20, num_groups, 2, 0.5) == pytest.approx(tokens / seconds)


def test_guesses_ahead_fill_the_bubbles_until_one_is_wrong():
    # of drafts of two, a run goes on with 0.125: 8/7 rounds, each after the first one stage later
    run_s = 4.5 + (8 / 7 - 1) * 1.0
    assert PIPELINE.rate(AHEAD, 1, 1, 2, 0.5) == pytest.approx(2.0 / run_s)


def test_stages_share_one_step_and_the_devices_of_one_target():
    whole, cut = (Pipeline.of(SYSTEM, count, 0.0) for count in (1, 4))
    assert cut.stage.base_s == pytest.approx(whole.stage.base_s), "a quarter of the weights on a quarter of the devices"
    assert cut.hop_s > whole.hop_s == 0.0


def test_a_row_more_takes_experts_until_all_are_taken():
    devices = ExpertDevices(accelerator=SYSTEM.accelerator, num_devices=8, context=0.0)
    assert devices.taken(1) == pytest.approx(8 / 8)
    assert devices.taken(2) == pytest.approx(16 / 8, rel=0.05)
    assert devices.taken(1000) == pytest.approx(128 / 8)
    alone = replace(devices, num_devices=1)
    assert alone.step_s(1, 1) < 0.2 * alone.step_s(128, 1)


def test_drafts_pay_more_the_more_stages_and_a_mixtures_from_some_load_on():
    study = study_stages(SYSTEM, LengthLaw())
    at = {(row.parts, row.way, row.acceptance, row.num_requests): row.ratio for row in study.stages}
    for load in LOADS:
        assert at[1, AHEAD, 0.7, load] < at[2, AHEAD, 0.7, load] < at[4, AHEAD, 0.7, load]
    experts = {(row.parts, row.acceptance, row.num_requests): row.ratio for row in study.experts}
    assert experts[8, 0.7, 4] < experts[8, 0.7, 1], "four requests' drafts take experts that nobody else takes"
    assert experts[8, 0.7, 64] > 1.5 * experts[8, 0.7, 4]


def test_the_verb_prints_both_tables_and_writes_them(tmp_path: Path):
    written = tmp_path / "stages.json"
    done = CliRunner().invoke(main, ["simulate", "--study", "stages", "--json", str(written)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "A target in stages" in done.output
    assert "A mixture's experts over devices" in done.output
    assert len(json.loads(written.read_text())["stages"]) == 3 * 3 * 3 * len(LOADS)
