"""The router's messages: a policy as operators change it, a verifier's report as its engine gives it."""

from __future__ import annotations

import pytest

from fakes.reports import verifier_report
from outrider.cluster.router.fleet import PolicyMode, RouterPolicy, VerifierReport, with_changes
from outrider.cluster.router.planning import table_length
from outrider.verifier_service.messages.engine import DrafterCircuit, EngineCounters

POLICY = RouterPolicy(mode=PolicyMode.ALWAYS, max_draft_length=5)


def test_a_policy_changes_where_it_is_named():
    changed = with_changes(POLICY, {"mode": "auto", "off_dwell_s": 1})
    assert changed.mode is PolicyMode.AUTO
    assert (changed.max_draft_length, changed.off_dwell_s, changed.on_dwell_s) == (5, 1, POLICY.on_dwell_s)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_draft_lenght": 3}, "unknown policy setting 'max_draft_lenght'; did you mean 'max_draft_length'"),
        ({"mode": "sometimes"}, "mode must be auto, always or off, not 'sometimes'"),
        ({"mode": True}, "mode must be"),
        ({"max_draft_length": "3"}, "max_draft_length must be a whole number, not '3'"),
        ({"max_draft_length": 2.5}, "max_draft_length must be a whole number"),
        ({"on_dwell_s": False}, "on_dwell_s must be a number"),
        ({"draft_length_by_batch_size": 3}, "draft_length_by_batch_size must be a list of rows"),
        ({"draft_length_by_batch_size": [3]}, "draft_length_by_batch_size must be a list of rows"),
        ({"draft_length_by_batch_size": [[1, 4]]}, "must be rows of three whole numbers"),
        ({"draft_length_by_batch_size": [[1, 4, 2.5]]}, "must be rows of three whole numbers"),
        ({"draft_length_by_batch_size": [[2, 4, 2]]}, "must begin at batch size 1"),
        ({"draft_length_by_batch_size": [[1, 4, -2]]}, "draft lengths of at least 0"),
        ({"draft_length_by_batch_size": [[1, 0, 2]]}, "first <= last"),
        ({"draft_length_by_batch_size": [[1, 4, 2], [4, 8, 1]]}, "ranges in order and apart"),
        ({"kv_pressure_from": 1.5}, r"kv_pressure_from must be in \[0, 1\]"),
        ({"off_dwell_s": -1}, "off_dwell_s must be at least 0"),
    ],
)
def test_a_bad_change_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        with_changes(POLICY, changes)


def test_a_table_is_read_as_vllm_reads_it():
    """Ranges include both ends; in a gap, and beyond the last range, the range before goes on."""
    policy = with_changes(POLICY, {"draft_length_by_batch_size": [[1, 2, 5], [5, 8, 3]]})
    assert policy.draft_length_by_batch_size == ((1, 2, 5), (5, 8, 3))
    lengths = [table_length(policy.draft_length_by_batch_size, size) for size in (0, 1, 2, 3, 4, 5, 8, 9, 999)]
    assert lengths == [5, 5, 5, 5, 5, 3, 3, 3, 3]


def report(state: str) -> VerifierReport:
    circuits = (DrafterCircuit(drafter_id="d0", state=state), DrafterCircuit(drafter_id="d1", state="closed"))
    return verifier_report(circuits=circuits, linked_drafters=("d0", "d1"))


def test_a_drafter_that_fails_its_verifier_is_not_up_there_whatever_its_link_says():
    assert report("open").drafters_up == ("d1",)
    assert report("half_open").drafters_up == ("d0", "d1"), "it may be tried again"


def test_frames_that_a_link_or_the_engine_cannot_read_are_counted_together():
    assert verifier_report(num_bad_link_frames=2, counters=EngineCounters(num_bad_frames=3)).num_bad_frames == 5
