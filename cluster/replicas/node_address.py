"""The address on which the replicas of this node listen."""

from __future__ import annotations

import ray

from outrider.cluster.config.service_config import ServiceConfig


def internal_address(config: ServiceConfig) -> str:
    """Return the address of internal ports: the configured one, or with `auto` this node's."""
    return ray.util.get_node_ip_address() if config.internal_host == "auto" else config.internal_host
