"""The policy by which Serve sizes the pools, alone and as Serve carries it to its controller."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from ray.serve.config import AutoscalingPolicy

from outrider.cluster.autoscaling import PoolPolicy, ReplicaRange, desired_replicas

TARGETS = {"num_requests": 10.0, "kv_usage": 0.8}


@dataclass
class Context:
    """What Serve tells a policy."""

    target_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    current_num_replicas: int = 1


@pytest.mark.parametrize(("text", "fewest", "most"), [(2, 2, 2), ("2", 2, 2), ("1:3", 1, 3), (0, 0, 0), ("2:2", 2, 2)])
def test_a_range_is_a_number_or_two(text, fewest, most):
    parsed = ReplicaRange.parse(text)
    assert (parsed.fewest, parsed.most, parsed.is_fixed) == (fewest, most, fewest == most)


@pytest.mark.parametrize("text", [-1, "3:1", "0:3", "a", "1:", ":3", "1:2:3", 1.5, True, None])
def test_a_bad_range_is_refused(text):
    with pytest.raises(ValueError, match="min:max"):
        ReplicaRange.parse(text)


@pytest.mark.parametrize(
    ("num_requests", "num_replicas", "desired"),
    [
        (0, 3, 1),  # never to zero: from there nobody would report any load
        (10, 1, 1),
        (11, 1, 2),
        (45, 1, 5),
        (20, 3, 3),  # two would be full to the brim, and grow again at once
        (16, 3, 2),
        (8, 3, 1),
    ],
)
def test_the_pool_follows_its_load_with_a_margin_downwards(num_requests, num_replicas, desired):
    assert desired_replicas({"num_requests": num_requests}, TARGETS, num_replicas) == desired


def test_the_scarcest_figure_decides():
    assert desired_replicas({"num_requests": 5, "kv_usage": 1.9}, TARGETS, 2) == 3
    assert desired_replicas({"num_requests": 35, "kv_usage": 0.1}, TARGETS, 2) == 4


def test_replicas_are_summed():
    context = Context(
        2, {"num_requests": {"a": 14.0, "b": 16.0}, "kv_usage": {"a": 0.1, "b": 0.1}, "other": {"a": 99.0}}
    )
    assert PoolPolicy(TARGETS)(context) == (3, {})


@pytest.mark.parametrize("metrics", [{}, {"other": {"a": 1.0}}, {"num_requests": {}}])
def test_a_pool_that_says_nothing_is_left_alone(metrics):
    assert PoolPolicy(TARGETS)(Context(2, metrics)) == (2, {})


def test_serve_carries_the_policy_to_its_controller():
    policy = AutoscalingPolicy(
        policy_function="outrider.cluster.autoscaling:PoolPolicy", policy_kwargs={"targets": TARGETS}
    )
    there = policy.get_policy()(**policy.policy_kwargs)
    assert there(Context(1, {"num_requests": {"a": 25.0}})) == (3, {})
