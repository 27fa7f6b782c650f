"""Days of the autoscaler: what is written down, and one that `tests/services/scaling_day.py` recorded, replayed."""

from __future__ import annotations

import dataclasses
import gzip
import math
import shutil
from itertools import groupby
from pathlib import Path

import pytest

from outrider.cluster.scaling.autoscaling import (
    DraftersLoad,
    PoolsLoad,
    PoolsPolicy,
    ReplicaRange,
    ScalingReason,
    VerifiersLoad,
    desired_pools,
)
from outrider.cluster.scaling.days import DayRecorder, Moment
from tiny.recorded_days import read_day

DAY = read_day(Path(__file__).with_name("recorded_day.jsonl.gz"))
POLICY = PoolsPolicy(verifiers=ReplicaRange(1, 8), requests_per_verifier=10.0)


def moment(at_s: float, num_requests: float) -> Moment:
    load = PoolsLoad(
        verifiers=VerifiersLoad(num_replicas=1, num_ready=1, num_with_knee=1, num_requests=num_requests, price=0.25),
        drafters=DraftersLoad(num_replicas=1, num_ready=1, late_share=0.125),
    )
    return Moment(at_s=at_s, load=load, policy=POLICY, sizes=desired_pools(load, POLICY))


def test_new_wishes_are_recorded_at_once_and_new_figures_once_a_second(tmp_path: Path):
    path = tmp_path / "day.jsonl"
    recorder = DayRecorder(path)
    first, wish, late = moment(10.0, 5.0), moment(10.2, 25.0), moment(11.2, 26.0)
    for one in (first, moment(10.1, 6.0), wish, moment(10.3, 26.0), moment(11.1, 27.0), late, moment(13.0, 26.0)):
        recorder.record(one)
    assert read_day(path) == [first, wish, late]
    DayRecorder(path).record(first)
    assert read_day(path) == [first, wish, late, first], "a restart goes on where it was"


def test_where_nothing_can_be_written_the_log_says_so_and_the_pools_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    DayRecorder(tmp_path / "nowhere" / "day.jsonl").record(moment(1.0, 1.0))
    folder = tmp_path / "days"
    folder.mkdir()
    recorder = DayRecorder(folder / "day.jsonl")
    shutil.rmtree(folder)
    for at_s in (1.0, 3.0, 5.0):
        recorder.record(moment(at_s, at_s))
    first, second = caplog.messages
    assert "recorded_to" in first
    assert "nowhere" in first
    assert "days/day.jsonl" in second


def test_a_line_that_was_cut_short_costs_no_other(tmp_path: Path):
    path = tmp_path / "day.jsonl"
    first, second = moment(1.0, 1.0), moment(2.0, 2.0)
    DayRecorder(path).record(first)
    whole = path.read_bytes()
    for length in range(1, len(whole)):
        path.write_bytes(whole + whole[:length])
        DayRecorder(path).record(second)
        read = read_day(path)
        assert (read[0], read[-1], len(read)) == (first, second, 2 + (length == len(whole) - 1)), length


def test_a_packed_day_is_not_recorded_to(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    packed = tmp_path / "day.gz"
    packed.write_bytes(before := gzip.compress(b""))
    DayRecorder(packed).record(moment(1.0, 1.0))
    assert packed.read_bytes() == before
    assert "is packed" in caplog.text


def test_what_a_policy_leaves_out_is_read_as_it_was(tmp_path: Path):
    policy = dataclasses.replace(POLICY, requests_per_verifier=math.inf)
    endless = dataclasses.replace(moment(1.0, 1.0), policy=policy)
    DayRecorder(tmp_path / "day").record(endless)
    assert read_day(tmp_path / "day") == [endless]


def test_a_clock_that_is_set_back_stops_no_recording(tmp_path: Path):
    recorder = DayRecorder(tmp_path / "day")
    for one in (moment(100.0, 1.0), moment(10.0, 2.0)):
        recorder.record(one)
    assert [one.at_s for one in read_day(tmp_path / "day")] == [100.0, 10.0]


# --- a recorded day: nobody, one stream, 48, one, nobody ---


def runs(values: list[int]) -> list[int]:
    return [value for value, _ in groupby(values)]


def test_of_a_recorded_day_the_policy_wants_what_it_wanted():
    assert len(DAY) > 100
    for recorded in DAY:
        assert desired_pools(recorded.load, recorded.policy) == recorded.sizes


def test_on_the_recorded_day_each_pool_followed_the_price_without_a_turn_too_many():
    assert runs([recorded.load.verifiers.num_replicas for recorded in DAY]) == [1, 2, 1]
    deployed = [1, 0]  # and then the texts of plain decoding are asked for
    assert runs([recorded.load.drafters.num_replicas for recorded in DAY]) == [*deployed, 1, 0, 1, 0, 1, 0]
    noon = [recorded for recorded in DAY if recorded.load.verifiers.num_requests > 40]
    assert {ScalingReason.COMPUTE_BOUND} < {recorded.sizes.drafters.reason for recorded in noon}
    assert noon[-1].load.drafters.num_replicas == 0


def test_another_policy_can_be_asked_about_the_same_day():
    busiest = max(DAY, key=lambda recorded: recorded.load.verifiers.num_requests)
    generous = dataclasses.replace(busiest.policy, verifiers=ReplicaRange(1, 16), requests_per_verifier=4.0)
    sizes = desired_pools(busiest.load, generous)
    assert (sizes.verifiers.num_replicas, sizes.verifiers.reason) == (12, ScalingReason.REQUESTS)
