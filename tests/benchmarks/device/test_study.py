"""The played accelerator: what it takes, what is decided over it, and the study's tables in a few steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

from benchmarks.device.engines import DRAFT_LENGTH, Pair, apart, beside, decode_steps, played_engine
from benchmarks.device.played import H100_8B, VirtualClock
from benchmarks.device.study import COLD_PAIR, PARTS, device


def test_forwards_take_what_the_table_says_and_beyond_it_grow_as_at_its_end():
    captured = {"is_captured": True, "num_context_tokens": 0}
    assert H100_8B.of(1, **captured) == pytest.approx(6.48e-3)
    assert 7.13e-3 < H100_8B.of(160, **captured) < 8.6e-3
    assert H100_8B.of(4096, **captured) == pytest.approx(52.5e-3 * 2, rel=0.01)
    eager_s = H100_8B.of(1, is_captured=False, num_context_tokens=1000)
    assert eager_s == pytest.approx((6.48 + 12.3 + 0.05) * 1e-3)


def test_plain_steps_take_their_forward_where_the_host_takes_no_time():
    found = decode_steps(played_engine(Pair(), VirtualClock()), 1, num_skipped=4, num_steps=16)
    assert found.step_s == pytest.approx(6.48e-3, rel=0.01)
    assert (found.drafted, found.accepted) == (0.0, None)


@pytest.mark.parametrize(("streams", "least"), [(1, 2.6), (16, 2.2), (64, 1.6), (256, 0.985)])
@pytest.mark.parametrize("pair", [Pair(), COLD_PAIR], ids=["warm", "cold"])
def test_within_64_steps_drafts_are_as_long_as_they_pay(streams: int, least: float, pair: Pair):
    """As issue O asks; after dear first calls as soon as without."""
    pair = replace(pair, max_requests=streams)
    plain = decode_steps(played_engine(pair, VirtualClock()), streams, num_steps=32)
    found = decode_steps(beside(pair, VirtualClock()), streams, num_steps=32)
    assert found.tokens_per_s / plain.tokens_per_s >= least
    if streams == 1:
        assert found.drafted == DRAFT_LENGTH


def test_drafts_that_never_pay_cost_little():
    pair = Pair(share_right=0.02, max_requests=1)
    plain = decode_steps(played_engine(pair, VirtualClock()), 1, num_steps=256)
    found = decode_steps(beside(pair, VirtualClock()), 1, num_steps=256)
    assert found.tokens_per_s / plain.tokens_per_s > 0.97


def test_a_drafter_in_a_process_of_its_own_drafts_for_a_played_verifier():
    with apart(Pair(num_ahead_branches=2, max_requests=2)) as played:
        found = decode_steps(played, 2, num_skipped=8, num_steps=8)
    assert found.drafted > 0
    assert found.accepted is not None


def test_the_study_writes_its_tables():
    shown = CliRunner().invoke(device, ["--virtual", "--streams", "1", "--steps", "16"], catch_exceptions=False)
    assert shown.exit_code == 0
    assert "## Decisions, in virtual time" in shown.stdout
    assert "| 1 | 154 |" in shown.stdout


def test_the_study_says_what_a_step_takes_by_part():
    shown = CliRunner().invoke(device, ["--parts", "--streams", "1", "--steps", "8"], catch_exceptions=False)
    assert shown.exit_code == 0
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.stdout.splitlines() if "| 1 |" in line]
    parts = {row[1]: dict(zip(("step", *PARTS), map(float, row[2:]), strict=True)) for row in rows}
    assert parts["none"]["drafting"] == parts["none"]["waiting"] == 0.0
    assert 0.0 < parts["one process"]["drafting"] < 3.6, "what is left of four levels once the step behind is launched"
    assert parts["two"]["waiting"] > 0.0, "by the clock: on a busy machine less than 3.6 ms is left to wait for"
    assert parts["two"]["drafting"] == 0.0
