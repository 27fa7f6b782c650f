"""The pools' policy as Ray Serve calls it: from its contexts to `desired_pools` and back.

Serve has two kinds of policies. `ServicePolicy` is one for the whole application (`autoscaling_policy` of the
application in a deployed configuration): it sees every deployment, so it can couple the pools and restart drafters from
zero. Serve reads it from a configuration only; an application that runs without one uses `PoolPolicy`, which sizes each
deployment by its own figures.

Requests arrive on our own ports, so Serve's count of ongoing requests is meaningless. Instead every replica exports its
load by `record_autoscaling_stats`, which Serve calls for deployments with an `autoscaling_config`.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outrider.cluster.scaling.autoscaling import (
    FIRST_POOL,
    PoolSize,
    PoolSizes,
    PoolsPolicy,
    ReplicaRange,
    desired_pools,
    desired_replicas,
)
from outrider.cluster.scaling.days import DayRecorder, Moment
from outrider.cluster.scaling.figures import Figures, pools_load

logger = logging.getLogger("ray.serve")  # policies run in Serve's controller: this logger writes to its log
GATEWAY_TARGETS = {"num_requests": 256.0}  # streams of one gateway: as many as a verifier runs at once

VERIFIERS = "Verifier"  # deployments
PREFILL_VERIFIERS = "PrefillVerifier"  # those of role prefill
_DRAFTERS = "Drafter"  # the first pool's deployment
_LEARNERS = "Learner"  # the same of its learner
_JOINT = "-"  # between that and another pool's name


def verifier_targets(policy: PoolsPolicy) -> dict[str, float]:
    """Return what a verifier is filled to, where no policy couples it with drafters."""
    return {"num_requests": policy.requests_per_verifier, "kv_usage": policy.kv_usage}


def drafter_deployment(pool: str) -> str:
    """Return the name of a drafter pool's deployment."""
    return _DRAFTERS if pool == FIRST_POOL else f"{_DRAFTERS}{_JOINT}{pool}"


def learner_deployment(pool: str) -> str:
    """Return the name of the deployment of a pool's learner."""
    return _LEARNERS if pool == FIRST_POOL else f"{_LEARNERS}{_JOINT}{pool}"


def is_learner(deployment: str) -> bool:
    """Tell whether a deployment is a pool's learner."""
    return deployment.partition(_JOINT)[0] == _LEARNERS


def _pool_of(deployment: str) -> str | None:
    """Return a deployment's drafter pool; None: it has no drafters."""
    kind, joint, pool = deployment.partition(_JOINT)
    return (pool if joint else FIRST_POOL) if kind == _DRAFTERS else None


class ScalingContext(Protocol):
    """The part of Serve's `AutoscalingContext` that is used here."""

    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    policy_state: dict[str, Any]

    @property
    def aggregated_metrics(self) -> Figures | None:
        """Return {metric: {replica: mean over the look-back period}}."""


class Deployment(Protocol):
    """Serve's `DeploymentID`."""

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class PoolPolicy:
    """Scale a deployment so that no exported figure exceeds its target per replica."""

    targets: Mapping[str, float]

    def __call__(self, context: ScalingContext) -> tuple[int, dict[str, Any]]:
        """Return the wanted number of replicas, and no state; without figures, the number stays."""
        metrics = context.aggregated_metrics or {}
        totals = {name: sum(metrics[name].values()) for name in self.targets if metrics.get(name)}
        if not totals:
            return context.target_num_replicas, {}
        return desired_replicas(totals, self.targets, context.target_num_replicas), {}


class ServicePolicy:
    """Scale verifiers and all pools of drafters together, gateways and verifiers for prompts by their own figures.

    `settings` are fields of `PoolsPolicy`; its ranges are Serve's bounds of the deployments. Decisions and the figures
    behind them are appended to the file `recorded_to` (`days.py`), on the head node's disk.
    """

    def __init__(self, recorded_to: str | None = None, **settings: float) -> None:
        self._policy = PoolsPolicy(**settings)  # type: ignore[arg-type]  # the ranges are not given here
        self._recorder = None if recorded_to is None else DayRecorder(Path(recorded_to))
        self._gateway = PoolPolicy(GATEWAY_TARGETS)
        self._prefill = PoolPolicy(verifier_targets(self._policy))

    def __call__(
        self, contexts: Mapping[Deployment, ScalingContext]
    ) -> tuple[dict[Deployment, int], dict[Deployment, dict[str, Any]]]:
        """Return the wanted replicas and the state to keep, by deployment."""
        by_name = {deployment.name: context for deployment, context in contexts.items()}
        sizes = self._sizes(by_name)
        wanted: dict[Deployment, int] = {}
        states: dict[Deployment, dict[str, Any]] = {}
        for deployment, context in contexts.items():
            if (size := sizes.get(deployment.name)) is not None:
                wanted[deployment] = size.num_replicas
                states[deployment] = _log_wish(deployment.name, size, context)
            else:
                policy = self._prefill if deployment.name == PREFILL_VERIFIERS else self._gateway
                wanted[deployment], states[deployment] = policy(context)
        return wanted, states

    def _sizes(self, by_name: Mapping[str, ScalingContext]) -> dict[str, PoolSize]:
        """Return each pool's size, by deployment."""
        verifier = by_name.get(VERIFIERS)
        drafters = {name: pool for name in by_name if (pool := _pool_of(name)) is not None}
        found: dict[str, PoolSize] = {}
        for name, pool in drafters.items() or {drafter_deployment(FIRST_POOL): FIRST_POOL}.items():
            sizes = self._decide(pool, verifier, by_name.get(name))
            found[VERIFIERS], found[name] = sizes.verifiers, sizes.drafters
        return found

    def _decide(self, pool: str, verifier: ScalingContext | None, drafter: ScalingContext | None) -> PoolSizes:
        load = pools_load(
            _figures(verifier),
            _figures(drafter),
            num_verifiers=0 if verifier is None else verifier.target_num_replicas,
            num_drafters=0 if drafter is None else drafter.target_num_replicas,
        )
        policy = dataclasses.replace(self._policy, verifiers=_range(verifier), drafters=_range(drafter))
        sizes = desired_pools(load, policy)
        if self._recorder is not None:
            self._recorder.record(Moment(at_s=time.time(), pool=pool, load=load, policy=policy, sizes=sizes))
        return sizes


def _figures(context: ScalingContext | None) -> Figures:
    return {} if context is None else context.aggregated_metrics or {}


def _range(context: ScalingContext | None) -> ReplicaRange:
    if context is None:
        return ReplicaRange(0, 0)
    return ReplicaRange(context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas)


def _log_wish(name: str, size: PoolSize, context: ScalingContext) -> dict[str, Any]:
    """Log a new wish to resize the pool; return it, as the state that the next one is compared with."""
    wish = {"wanted": size.num_replicas, "reason": size.reason.value}
    is_new = any(context.policy_state.get(key) != value for key, value in wish.items())
    if is_new and size.num_replicas != context.target_num_replicas:
        logger.info("%s: %d wanted, %d now: %s", name, size.num_replicas, context.target_num_replicas, size.reason)
    return wish
