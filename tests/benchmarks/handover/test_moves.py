"""The figures of a study of requests that move, without a service."""

from __future__ import annotations

from benchmarks.handover.moves import ARMS, Figures, moved_of
from benchmarks.weights.served_model import Told
from outrider.cluster.router.fleet import RouterPolicy
from outrider.lab.same_tokens import Pair


def test_moved_requests_are_counted_over_all_gateways_and_others_are_not():
    metrics = "\n".join(
        (
            "# TYPE outrider_handovers_total counter",
            'outrider_handovers_total{outcome="moved",reason="",replica="a"} 3.0',
            'outrider_handovers_total{outcome="moved",reason="",replica="b"} 2.0',
            'outrider_handovers_total{outcome="taken",reason="",replica="a"} 7.0',
            'outrider_handover_wait_seconds_count{outcome="moved"} 9.0',
        )
    )
    assert moved_of(metrics) == 5


def test_a_row_says_ends_and_what_differs_from_the_first_arm():
    same, right, wrong = (Told(prompt=(1,), token_ids=token_ids) for token_ids in ((5, 6), (7,), (8,)))
    first = Figures(2.0, 0, [4.0, 8.0], 0.5, [same, right])
    second = Figures(2.5, 1, [3.0, 4.0], 0.25, [same, wrong])
    assert second.row("x", first) == ["x", "2.5", "1", "3.5", "4.0", "0.25", "1 of 2"]
    assert second.pairs("x", first)[1] == Pair(what="x, request 1", prompt=(1,), expected=(7,), given=(8,))


def test_arms_differ_in_a_setting_that_the_router_knows():
    assert {RouterPolicy(move_after_s=value).move_after_s for value in ARMS.values()} == {1.0, 1e9}
