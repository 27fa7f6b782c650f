"""The Serve application: gateway, router, verifiers, drafters and their learners are its deployments.

`serve run outrider.cluster.app:build_app` serves the embedded pair; options follow as `key=value` and are those of
`ServiceConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import click
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import RayServeException

from outrider.cluster.common.api_keys import with_api_key_hashes
from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.config.placement import SHELL_CPUS
from outrider.cluster.config.pools_config import PoolsConfig
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.directory_replica import DirectoryReplica
from outrider.cluster.replicas.drafter_replica import DrafterReplica
from outrider.cluster.replicas.gateway_replica import GatewayReplica
from outrider.cluster.replicas.learner_replica import LearnerReplica
from outrider.cluster.replicas.router_replica import RouterReplica
from outrider.cluster.replicas.verifier_replica import VerifierReplica
from outrider.cluster.router.fleet import VerifierRole
from outrider.cluster.scaling.autoscaling import PoolsPolicy, ReplicaRange
from outrider.cluster.scaling.serve_scaling import (
    GATEWAY_TARGETS,
    PREFILL_VERIFIERS,
    VERIFIERS,
    drafter_deployment,
    learner_deployment,
    verifier_targets,
)
from outrider.drafter_service.service.drafter_spec import common_state_taps
from outrider.verifier_service.model.ranks import RankMain

MAX_ONGOING_REQUESTS = 4096
STOP_MARGIN_S = 5.0  # for what a replica does after it has drained, before Serve kills it
# targets per replica where no policy couples the pools
_POLICY = PoolsPolicy()
VERIFIER_TARGETS = verifier_targets(_POLICY)
DRAFTER_TARGETS = {"num_sessions": _POLICY.sessions_per_drafter, "queue_depth": _POLICY.queue_per_drafter}
UPSCALE_DELAY_S = 5.0
DOWNSCALE_DELAY_S = 60.0
LEARNER_HEALTH_TIMEOUT_S = 30.0  # no request waits for a learner
TO_ZERO_DELAY_S = 600.0  # a pool restarts slowly from zero


class OptionsError(click.ClickException, RayServeException):
    """Invalid options. Each base class makes the error one line in one place.

    `ClickException` does so on the command line, where `serve run module:build_app key=value` runs in this process;
    `RayServeException` in Serve's deploy task, which tries four times after any other error and reports a traceback.
    """


def build_app(options: dict[str, Any]) -> Application:
    """Build the application from plain options, as Serve's command line and YAML pass them; raises `OptionsError`.

    Where Serve's proxies listen is not known here: who changes weights needs an admin's key, whatever `host` says.
    """
    try:
        config = ServiceConfig(**with_api_key_hashes(options, os.environ))
        config.require_admin("Ray Serve's http_options")
        return build(config)
    except (ValueError, OSError) as error:
        raise OptionsError(str(error)) from error


def build(config: ServiceConfig, main: RankMain | None = None) -> Application:
    """Build the application of a configuration. `main`: what the ranks of verifiers run in place of its engine."""
    config = config.with_options(device=config.model.settled_device)
    common_state_taps(config.drafter_specs)  # refuses pools that read different states
    router = _deployment(RouterReplica, "Router", num_replicas=1).bind(config.router_policy)
    gateway = _deployment(
        GatewayReplica,
        "Gateway",
        **_scaling(config.gateway.num_gateways, GATEWAY_TARGETS),
        # Serve waits for its proxies' streams, then we for those of our own ports
        graceful_shutdown_timeout_s=2 * config.drain_timeout_s + STOP_MARGIN_S,
        max_surge_percent=100,  # a new gateway takes calls before the old one stops: they share their port
    )
    # Serve deploys everything that the ingress is bound to
    learners = _learners(config, router)
    pools = _drafter_pools(config, router, learners)
    return gateway.bind(config, router, learners, *_verifiers(config, router, main), *pools)


def build_drafters(config: DraftersConfig) -> Application:
    """Build a pool without verifiers: drafters, their router and the directory that other engines follow."""
    config = config.with_options(device=config.model.settled_device)
    router = _deployment(RouterReplica, "Router", num_replicas=1).bind(config.router_policy)
    directory = _deployment(DirectoryReplica, "Directory", num_replicas=1)
    learners = _learners(config, router)
    return directory.bind(config, router, learners, *_drafter_pools(config, router, learners))


def build_drafters_app(options: dict[str, Any]) -> Application:
    """Build a pool without verifiers from plain options, as `build_app` does; raises `OptionsError`."""
    try:
        return build_drafters(DraftersConfig(**with_api_key_hashes(options, os.environ)))
    except (ValueError, OSError) as error:
        raise OptionsError(str(error)) from error


def _verifiers(config: ServiceConfig, router: Application, main: RankMain | None) -> list[Application]:
    """Bind the verifiers, those of role prefill on their own."""
    stop_s = config.drain_timeout_s + STOP_MARGIN_S
    verifier = _deployment(
        VerifierReplica,
        VERIFIERS,
        # drafters are scaled by verifiers' figures too, which Serve collects from autoscaled deployments only
        **_scaling(
            config.num_verifiers,
            VERIFIER_TARGETS,
            is_watched=not all(pool.num_drafters.is_fixed for pool in config.pools.values()),
        ),
        **config.verifier_placement.serve_options,
        graceful_shutdown_timeout_s=stop_s,
    )
    bound = [verifier.bind(config, router, config.role, main)]
    if config.verifiers.num_prefill_verifiers.most:
        prefill = _deployment(
            VerifierReplica,
            PREFILL_VERIFIERS,
            **_scaling(config.verifiers.num_prefill_verifiers, VERIFIER_TARGETS),
            **config.prefill_placement.serve_options,
            graceful_shutdown_timeout_s=stop_s,
        )
        bound.append(prefill.bind(config, router, VerifierRole.PREFILL, main))
    return bound


def _learners(config: PoolsConfig, router: Application) -> dict[str, Application]:
    """Bind the learner of every pool that has one."""
    return {
        name: _deployment(
            LearnerReplica,
            learner_deployment(name),
            num_replicas=1,
            **config.learner_placement(pool).serve_options,
            health_check_timeout_s=LEARNER_HEALTH_TIMEOUT_S,
        ).bind(config, router, name)
        for name, pool in config.learning.items()
    }


def _drafter_pools(config: PoolsConfig, router: Application, learners: Mapping[str, Application]) -> list[Application]:
    """Bind every drafter pool."""
    return [
        _deployment(
            DrafterReplica,
            drafter_deployment(name),
            **_scaling(pool.num_drafters, DRAFTER_TARGETS),
            **config.drafter_placement(pool).serve_options,
            graceful_shutdown_timeout_s=config.drain_timeout_s + STOP_MARGIN_S,
        ).bind(config, router, name, learners.get(name))
        for name, pool in config.pools.items()
    ]


def _deployment(replica: type, name: str, **options: Any) -> serve.Deployment:
    defaults: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": MAX_ONGOING_REQUESTS,
        "ray_actor_options": {"num_cpus": SHELL_CPUS},
        "logging_config": {"enable_access_log": False},  # reports to the router come several times a second
        # a replica that fails its health checks is replaced within seconds, not after Serve's default of half a minute
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 5.0,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": STOP_MARGIN_S,
    }
    return serve.deployment(**(defaults | options))(replica)


def _scaling(replicas: ReplicaRange, targets: dict[str, float], *, is_watched: bool = False) -> dict[str, Any]:
    """Return a deployment's scaling options; Serve starts a pool whose minimum is 0 with one replica."""
    if replicas.is_fixed and not is_watched:
        return {"num_replicas": replicas.fewest}
    policy = AutoscalingPolicy(
        policy_function="outrider.cluster.scaling.serve_scaling:PoolPolicy", policy_kwargs={"targets": targets}
    )
    scaling = AutoscalingConfig(
        min_replicas=replicas.fewest,
        max_replicas=replicas.most,
        initial_replicas=1 if replicas.fewest == 0 else None,
        upscale_delay_s=UPSCALE_DELAY_S,
        downscale_delay_s=DOWNSCALE_DELAY_S,
        downscale_to_zero_delay_s=TO_ZERO_DELAY_S,
        policy=policy,
    )
    return {"autoscaling_config": scaling}
