"""The Serve application: gateway, router, verifiers and drafters are its deployments.

`serve run outrider.cluster.app:build_app` serves the embedded pair; options follow as `key=value` and are those of
`ServiceConfig`.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from outrider.cluster.config import ServiceConfig
from outrider.cluster.drafter_replica import DrafterReplica
from outrider.cluster.gateway_replica import GatewayReplica
from outrider.cluster.rank_actors import RANK_CPUS
from outrider.cluster.router_replica import RouterReplica
from outrider.cluster.verifier_replica import VerifierReplica

_SHELL_CPUS = 0.1  # gateways, routers and the shells of engines wait for I/O
MAX_ONGOING_REQUESTS = 4096


def build_app(options: dict[str, Any]) -> Application:
    """Build the application from plain options, as Serve's command line and YAML pass them."""
    return build(ServiceConfig.from_mapping(options))


def build(config: ServiceConfig) -> Application:
    """Build the application of a configuration."""
    router = _deployment(RouterReplica, "Router").bind(config.router_policy)
    # Serve deploys what the ingress is bound to
    pools = [_pool(VerifierReplica, "Verifier", config.num_verifiers, config.tensor_parallel_size, config, router)]
    if config.draft_path is not None:
        ranks = config.draft_tensor_parallel_size
        pools.append(_pool(DrafterReplica, "Drafter", config.num_drafters, ranks, config, router))
    return _deployment(GatewayReplica, "Gateway").bind(config, router, *pools)


def _deployment(replica: type, name: str) -> serve.Deployment:
    make = serve.deployment(
        name=name,
        num_replicas=1,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        ray_actor_options={"num_cpus": _SHELL_CPUS},
        logging_config={"enable_access_log": False},  # reports to the router come several times a second
        # a replica that fails its health checks is replaced within seconds, not after Serve's half a minute
        health_check_period_s=1.0,
        health_check_timeout_s=5.0,
        graceful_shutdown_timeout_s=5.0,
    )
    return make(replica)


def _pool(
    replica: type, name: str, num_replicas: int, num_ranks: int, config: ServiceConfig, router: Application
) -> Application:
    rank_bundle = {"CPU": RANK_CPUS} | ({"GPU": config.gpus_per_rank} if config.gpus_per_rank else {})
    deployment = _deployment(replica, name).options(
        num_replicas=num_replicas,
        placement_group_bundles=[{"CPU": _SHELL_CPUS}, *[rank_bundle] * num_ranks],
        placement_group_strategy="STRICT_PACK",  # ranks meet through Unix sockets
    )
    return deployment.bind(config, router)
