"""Days of the autoscaler: what is written down, and a real one, recorded by `tests/scaling_day.py`, decided again."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from pathlib import Path

import pytest

from outrider.cluster.autoscaling import (
    DraftersLoad,
    PoolsLoad,
    PoolsPolicy,
    ReplicaRange,
    ScalingReason,
    VerifiersLoad,
    desired_pools,
)
from outrider.cluster.scaling_days import DayRecorder, Moment, read_day

DAY = tuple(read_day(Path(__file__).with_name("recorded_day.jsonl.gz")))
POLICY = PoolsPolicy(verifiers=ReplicaRange(1, 8), requests_per_verifier=10.0)


def moment(at_s: float, num_requests: float) -> Moment:
    load = PoolsLoad(
        verifiers=VerifiersLoad(num_replicas=1, num_ready=1, num_requests=num_requests, price=0.25),
        drafters=DraftersLoad(num_replicas=1, num_ready=1, late_share=0.125),
    )
    return Moment(at_s=at_s, load=load, policy=POLICY, sizes=desired_pools(load, POLICY))


def test_new_wishes_are_recorded_at_once_and_new_figures_once_a_second(tmp_path: Path):
    path = tmp_path / "day.jsonl"
    recorder = DayRecorder(path)
    first, wish, late = moment(10.0, 5.0), moment(10.2, 25.0), moment(11.2, 26.0)
    for one in (first, moment(10.1, 6.0), wish, moment(10.3, 26.0), moment(11.1, 27.0), late, moment(13.0, 26.0)):
        recorder.record(one)
    assert list(read_day(path)) == [first, wish, late]
    DayRecorder(path).record(first)
    assert list(read_day(path)) == [first, wish, late, first], "a restart goes on where it was"


def test_where_nothing_can_be_written_the_policy_says_so(tmp_path: Path):
    with pytest.raises(OSError, match="nowhere"):
        DayRecorder(tmp_path / "nowhere" / "day.jsonl")


def test_a_line_that_is_no_moment_is_named(tmp_path: Path):
    path = tmp_path / "day.jsonl"
    DayRecorder(path).record(moment(1.0, 1.0))
    path.write_text(path.read_text() + '{"at_s": 2.0}\n')
    with pytest.raises(ValueError, match=r"line 2.*\n.*\n?load"):
        list(read_day(path))


# --- a recorded day: nobody, one stream, 32, one, nobody ---


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
    noon = [recorded for recorded in DAY if recorded.load.verifiers.num_requests > 20]
    assert {ScalingReason.COMPUTE_BOUND} < {recorded.sizes.drafters.reason for recorded in noon}
    assert noon[-1].load.drafters.num_replicas == 0


def test_a_price_near_one_for_a_single_stream_brought_no_verifier():
    """Drafts of a drafter that had just started did not pay, with the verifier far below its knee."""
    cold = [
        recorded
        for recorded in DAY
        if recorded.load.verifiers.num_requests <= 1.0
        and recorded.load.verifiers.price >= recorded.policy.high_price
        and recorded.load.drafters.num_ready > 0
    ]
    assert cold
    for recorded in cold:
        assert recorded.load.verifiers.num_replicas == recorded.sizes.verifiers.num_replicas == 1
        assert recorded.sizes.drafters.num_replicas == 1
        unknown = dataclasses.replace(recorded.load.verifiers, knee_fill=0.0)
        blind = desired_pools(dataclasses.replace(recorded.load, verifiers=unknown), recorded.policy)
        assert blind.verifiers.num_replicas == 2, "by the price alone it would have"


def test_another_policy_can_be_asked_about_the_same_day():
    busiest = max(DAY, key=lambda recorded: recorded.load.verifiers.num_requests)
    generous = dataclasses.replace(busiest.policy, verifiers=ReplicaRange(1, 16), requests_per_verifier=4.0)
    sizes = desired_pools(busiest.load, generous)
    assert (sizes.verifiers.num_replicas, sizes.verifiers.reason) == (8, ScalingReason.REQUESTS)
