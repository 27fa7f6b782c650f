"""Where the replicas of this node listen for each other."""

from __future__ import annotations

import ray

from outrider.cluster.config.pools_config import LinkOptions


def internal_address(links: LinkOptions) -> str:
    """Return the address of the ports between our own services: the configured one, or with `auto` this node's."""
    return ray.util.get_node_ip_address() if links.internal_host == "auto" else links.internal_host
