"""The policies as Serve carries them to its controller and calls them there."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.app import build
from outrider.cluster.scaling.autoscaling import ReplicaRange
from outrider.cluster.scaling.serve_scaling import PoolPolicy, ServicePolicy
from tiny.recorded_days import read_day

TARGETS = {"num_requests": 10.0, "kv_usage": 0.8}
BUSY = {"num_requests": 30.0, "kv_usage": 0.1, "knee_fill": 0.5, "price": 0.2, "num_undrafted": 0.0}
IDLE = dict.fromkeys(BUSY, 0.0)
DRAFTS = {"num_drafts_in_time": 9.0, "num_drafts_late": 0.0}


@dataclass(frozen=True)
class Deployment:
    name: str
    app_name: str = "outrider"


@dataclass
class Context:
    """What Serve tells a policy."""

    target_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    capacity_adjusted_min_replicas: int = 0
    capacity_adjusted_max_replicas: int = 8
    policy_state: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *replicas: dict[str, float], target: int | None = None, **bounds: Any) -> Context:
        names = replicas[0] if replicas else {}
        metrics = {name: {str(i): replica[name] for i, replica in enumerate(replicas)} for name in names}
        return cls(len(replicas) if target is None else target, metrics, **bounds)


def wanted(policy: ServicePolicy, **contexts: Context) -> dict[str, int]:
    answers, states = policy({Deployment(name): context for name, context in contexts.items()})
    assert answers.keys() == states.keys()
    return {deployment.name: answer for deployment, answer in answers.items()}


def drafter(num_sessions: float = 0.0, queue_depth: float = 0.0) -> dict[str, float]:
    return {"num_sessions": num_sessions, "queue_depth": queue_depth}


def test_replicas_are_summed():
    context = Context(
        2, {"num_requests": {"a": 14.0, "b": 16.0}, "kv_usage": {"a": 0.1, "b": 0.1}, "other": {"a": 99.0}}
    )
    assert PoolPolicy(TARGETS)(context) == (3, {})


@pytest.mark.parametrize("metrics", [{}, {"other": {"a": 1.0}}, {"num_requests": {}}])
def test_a_pool_that_says_nothing_is_left_alone(metrics):
    assert PoolPolicy(TARGETS)(Context(2, metrics)) == (2, {})


def test_one_policy_sizes_every_pool_within_serves_bounds():
    policy = ServicePolicy(requests_per_verifier=10.0, sessions_per_drafter=8.0)
    pools = {
        "Verifier": Context.of(BUSY | DRAFTS, BUSY | DRAFTS),
        "Drafter": Context.of(drafter(num_sessions=60.0)),
        "Gateway": Context.of({"num_requests": 300.0}),
    }
    assert wanted(policy, **pools) == {"Verifier": 6, "Drafter": 8, "Gateway": 2}
    pools["Verifier"].capacity_adjusted_max_replicas = 4
    pools["Drafter"].capacity_adjusted_max_replicas = 3
    assert wanted(policy, **pools) == {"Verifier": 4, "Drafter": 3, "Gateway": 2}


def test_the_pools_are_coupled():
    policy = ServicePolicy()
    late = {"num_drafts_in_time": 1.0, "num_drafts_late": 1.0}
    assert wanted(policy, Verifier=Context.of(BUSY | late), Drafter=Context.of(drafter(4.0, 4.0)))["Drafter"] == 2
    dear = BUSY | DRAFTS | {"price": 0.97}
    assert wanted(policy, Verifier=Context.of(dear), Drafter=Context.of(drafter(4.0), drafter(4.0))) == {
        "Verifier": 2,
        "Drafter": 0,
    }
    lacking = BUSY | DRAFTS | {"num_undrafted": 3.0}
    assert wanted(policy, Verifier=Context.of(lacking), Drafter=Context.of())["Drafter"] == 1
    assert wanted(policy, Verifier=Context.of(IDLE | DRAFTS), Drafter=Context.of(drafter()))["Drafter"] == 0


def test_every_pool_of_drafters_is_sized_by_its_own_figures():
    pools = {
        "Verifier": Context.of(BUSY | DRAFTS),
        "Drafter": Context.of(drafter(num_sessions=4.0)),
        "Drafter-lookup": Context.of(drafter(num_sessions=60.0)),
    }
    policy = ServicePolicy(sessions_per_drafter=8.0)
    assert wanted(policy, **pools) == {"Verifier": 1, "Drafter": 1, "Drafter-lookup": 8}
    pools["Verifier"] = Context.of(BUSY | DRAFTS | {"price": 0.97})
    assert wanted(policy, **pools) == {"Verifier": 2, "Drafter": 0, "Drafter-lookup": 0}
    del pools["Drafter"]
    assert wanted(policy, **pools) == {"Verifier": 2, "Drafter-lookup": 0}


def test_a_pool_that_is_gone_comes_back_while_another_serves_everybody():
    """Or nobody would ever try it again; where drafts do not pay it stays away."""
    calm = BUSY | DRAFTS | {"num_willing": 5.0}
    pools = {"Drafter": Context.of(drafter(num_sessions=4.0)), "Drafter-lookup": Context.of()}
    assert wanted(ServicePolicy(), Verifier=Context.of(calm), **pools)["Drafter-lookup"] == 1
    for stays_away in ({"num_willing": 0.0}, {"price": 0.7}):
        assert wanted(ServicePolicy(), Verifier=Context.of(calm | stays_away), **pools)["Drafter-lookup"] == 0


def test_every_pool_is_recorded_by_its_name(tmp_path: Path):
    path = tmp_path / "day.jsonl"
    policy = ServicePolicy(recorded_to=str(path))
    pools = {"Drafter": Context.of(drafter(num_sessions=4.0)), "Drafter-lookup": Context.of(drafter(num_sessions=8.0))}
    for _ in range(2):
        wanted(policy, Verifier=Context.of(BUSY | DRAFTS), **pools)
    assert [(moment.pool, moment.load.drafters.num_sessions) for moment in read_day(path)] == [
        ("default", 4.0),
        ("lookup", 8.0),
    ]


def test_verifiers_for_prompts_are_sized_by_their_own_figures():
    busy = Context.of({"num_requests": 40.0, "kv_usage": 0.1})
    policy = ServicePolicy(requests_per_verifier=10.0)
    assert wanted(policy, Verifier=Context.of(IDLE | DRAFTS), PrefillVerifier=busy) == {
        "Verifier": 0,
        "PrefillVerifier": 4,
    }


def test_what_serve_does_not_scale_gets_no_answer():
    assert wanted(ServicePolicy(), Verifier=Context.of(BUSY | DRAFTS)) == {"Verifier": 1}


def test_a_wish_is_logged_once_with_its_reason(caplog):
    verifier = Context.of(BUSY | DRAFTS, target=1)
    policy = ServicePolicy(requests_per_verifier=10.0)
    with caplog.at_level(logging.INFO, logger="ray.serve"):
        _, states = policy({Deployment("Verifier"): verifier})
        assert [record.message for record in caplog.records] == ["Verifier: 3 wanted, 1 now: requests"]
        verifier.policy_state = states[Deployment("Verifier")]
        policy({Deployment("Verifier"): verifier})
        policy({Deployment("Verifier"): Context.of(BUSY | DRAFTS, target=3)})  # nothing to wish for
        assert len(caplog.records) == 1


def test_what_is_decided_is_recorded_where_the_operator_says(tmp_path: Path):
    path = tmp_path / "day.jsonl"
    policy = ServicePolicy(recorded_to=str(path), requests_per_verifier=10.0)
    assert wanted(policy, Verifier=Context.of(BUSY | DRAFTS, target=1))["Verifier"] == 3
    (moment,) = read_day(path)
    assert (moment.load.verifiers.num_requests, moment.sizes.verifiers.num_replicas) == (30.0, 3)
    assert (moment.policy.requests_per_verifier, moment.policy.verifiers) == (10.0, ReplicaRange(0, 8))
    assert abs(moment.at_s - time.time()) < 60.0


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(TypeError, match="sessions_per_verifier"):
        ServicePolicy(sessions_per_verifier=1.0)


@pytest.mark.parametrize(
    ("name", "kwargs"), [("PoolPolicy", {"targets": TARGETS}), ("ServicePolicy", {"requests_per_verifier": 10.0})]
)
def test_serve_carries_the_policies_to_its_controller(name, kwargs):
    policy = AutoscalingPolicy(policy_function=f"outrider.cluster.scaling.serve_scaling:{name}", policy_kwargs=kwargs)
    there = policy.get_policy()(**policy.policy_kwargs)
    if name == "PoolPolicy":
        assert there(Context(1, {"num_requests": {"a": 25.0}})) == (3, {})
    else:
        assert wanted(there, Verifier=Context.of(BUSY | DRAFTS)) == {"Verifier": 3}


# --- what the application asks of Serve ---


def scaling(**options: Any) -> dict[str, AutoscalingConfig | int]:
    """Return each deployment's autoscaling, or its fixed number of replicas."""
    gateway = build(ServiceConfig(device="cpu", **options))
    bound = [gateway, *(child for child in gateway._bound_deployment.init_args if hasattr(child, "_bound_deployment"))]
    deployments = [application._bound_deployment for application in bound]
    return {
        deployment.name: deployment._deployment_config.autoscaling_config or deployment.num_replicas
        for deployment in deployments
    }


def test_fixed_pools_are_not_scaled():
    assert scaling(num_verifiers=2, num_drafters=3) == {"Gateway": 1, "Router": 1, "Verifier": 2, "Drafter": 3}


def test_verifiers_for_prompts_are_a_deployment_with_its_own_range():
    scaled = scaling(num_verifiers=2, num_prefill_verifiers="1:3")
    assert (scaled["Verifier"], scaled["PrefillVerifier"].max_replicas) == (2, 3)
    assert "PrefillVerifier" not in scaling(num_verifiers=2)


def test_every_pool_of_drafters_is_a_deployment_with_its_own_range():
    pools = ({"name": "lookup", "method": "ngram", "num_drafters": "1:4"},)
    scaled = scaling(num_drafters=2, drafter_pools=pools)
    assert (scaled["Drafter"], scaled["Drafter-lookup"].max_replicas) == (2, 4)
    assert scaled["Verifier"].max_replicas == 1, "it is watched: drafters are scaled by what it exports"


def test_fixed_verifiers_are_watched_where_drafters_are_scaled():
    scaled = scaling(num_verifiers=2, num_drafters="0:3")
    assert (scaled["Verifier"].min_replicas, scaled["Verifier"].max_replicas) == (2, 2)
    drafters = scaled["Drafter"]
    assert (drafters.min_replicas, drafters.initial_replicas, drafters.max_replicas) == (0, 1, 3)
    assert drafters.downscale_to_zero_delay_s > drafters.downscale_delay_s
    assert scaled["Gateway"] == 1
    assert scaling(num_drafters="1:3")["Drafter"].initial_replicas is None
